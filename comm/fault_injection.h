// Test-only: lets a test kill or stop one rank at a named place. Compiled to nothing unless the
// build sets KVGRID_FAULT_INJECTION (on with the tests, off otherwise).
//
// KVGRID_FAULT = "kill:<place>:<rank>[:<count>]" or "stop:<place>:<rank>[:<count>]": on that rank
// the <count>-th (from 1, default 1) visit of the place raises SIGKILL or SIGSTOP. Places: start,
// append, attend, join.
#pragma once

namespace kvgrid::comm {

#ifdef KVGRID_FAULT_INJECTION
void faultPoint(const char* place, int rank);
#else
inline void faultPoint(const char* /*place*/, int /*rank*/) {}
#endif

}  // namespace kvgrid::comm
