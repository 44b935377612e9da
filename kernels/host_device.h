// Functions that host and device share, compiled by either compiler.
#pragma once

#ifdef __CUDACC__
#define KVGRID_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KVGRID_HOST_DEVICE inline
#endif
