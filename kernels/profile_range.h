// Names what runs for a profiler: an NVTX range of the domain "kvgrid" while it lives. Costs next
// to nothing without a profiler, and is nothing where this build has no CUDA.
#pragma once

namespace kvgrid {

class ProfileRange {
public:
    explicit ProfileRange(const char* name) noexcept;
    ~ProfileRange();
    ProfileRange(const ProfileRange&) = delete;
    ProfileRange& operator=(const ProfileRange&) = delete;
};

}  // namespace kvgrid
