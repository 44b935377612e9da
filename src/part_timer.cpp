#include "src/part_timer.h"

#include <utility>

namespace kvgrid {

std::vector<PartTimer::Span> PartTimer::takeSpans() noexcept {
    return std::exchange(spans_, {});
}

void PartTimer::add(const std::vector<Span>& spans) {
    spans_.insert(spans_.end(), spans.begin(), spans.end());
}

std::array<double, PartTimer::part_count> PartTimer::take() {
    std::array<double, part_count> seconds{};
    for (const Span& span : takeSpans())
        seconds[span.part] += span.to->secondsSince(*span.from);
    return seconds;
}

}  // namespace kvgrid
