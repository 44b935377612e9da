// Test-only: lets a test kill or stop one rank at a named place. Compiled to nothing unless the
// build sets KVGRID_FAULT_INJECTION (on with the tests, off otherwise).
//
// KVGRID_FAULT = "kill:<place>:<rank>[:<count>]" or "stop:<place>:<rank>[:<count>]": on that rank
// the <count>-th (from 1, default 1) visit of the place raises SIGKILL or SIGSTOP. Places: start,
// append, attend, join, collective.
//
// collective is visited just before the join's all-gather of some rows among several ranks is
// called, or a graph is launched among several ranks; never while one is captured, as nothing runs
// then. The signal comes amid the all-gather: the rank named goes on into it, and a thread of it
// raises the signal collective_delay later. The lowest of the other ranks waits for collective_hold
// at its own <count>-th visit, all further ranks go into the all-gather too. No all-gather ends
// before the last rank has entered it, whether it is the host that waits there (MPI) or the GPU
// (NCCL, a graph; the first of NCCL connects, on the host). So the rank named, and from three ranks
// on a survivor, are inside when the signal comes, provided that the rank named comes to its visit
// less than the difference of the two, 900 ms, after the one that waits: ranks that decode, and
// meet at every step, are milliseconds apart. Visits are those of the one thread that decodes.
#pragma once

#include <chrono>

namespace kvgrid::comm {

inline constexpr std::chrono::milliseconds collective_delay{100};
inline constexpr std::chrono::milliseconds collective_hold{1000};

#ifdef KVGRID_FAULT_INJECTION
inline constexpr bool has_fault_points = true;
void faultPoint(const char* place, int rank);
#else
inline constexpr bool has_fault_points = false;
inline void faultPoint(const char* /*place*/, int /*rank*/) {}
#endif

}  // namespace kvgrid::comm
