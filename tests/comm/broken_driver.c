// A libcuda.so.1 that is there and cannot start: enough of it for CUDA's runtime to ask.

int cuDriverGetVersion(int* version) {
    *version = 99000;  // newer than any runtime that this is built with
    return 0;
}

int cuInit(unsigned flags) {
    (void)flags;
    return 999;  // CUDA_ERROR_UNKNOWN
}
