// The plan of a step's attention: where it lies in memory, and the launch that makes it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "kernels/cuda/attend_schedule.cuh"

namespace kvgrid::cuda {

[[nodiscard]] PlanView planView(void* plan, std::size_t bytes);
void preparePlan();
void launchPlan(const AttendLaunch& launch, ::cudaStream_t stream);

}  // namespace kvgrid::cuda
