// The subcommands of kvgrid, a file each. argv[0] is the subcommand's own name.
//
// Each returns the exit code of the process: 0 right; 1 wrong values; 2 usage or bad input; 3 does
// not fit; 4 device or transport missing; 5 deadline passed or rank lost. What is thrown is
// reported by main.
#pragma once

namespace kvgrid::launch {

int runPlan(int argc, char** argv);
int runVerify(int argc, char** argv);
int runBench(int argc, char** argv);

}  // namespace kvgrid::launch
