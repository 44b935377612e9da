// The preamble that verify and bench share: what ran, with what, on which ranks.
#pragma once

#include <kvgrid/process.h>

#include "launch/decode_options.h"
#include "launch/report.h"

namespace kvgrid::launch {

void describeRun(Report& report, const Process& process, const DecodeOptions& options,
                 const DecodeSetup& setup);

}  // namespace kvgrid::launch
