// Device time of the parts of a step, from events on its stream.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "kernels/device.h"

namespace kvgrid {

class PartTimer {
public:
    enum Part : std::size_t { append, attend, join, part_count };

    // From one event to another on one stream.
    struct Span {
        Part part = append;
        std::shared_ptr<Event> from, to;
    };

    void setOn(bool on) noexcept { on_ = on; }
    [[nodiscard]] bool isOn() const noexcept { return on_; }

    // Runs `work`, which enqueues on the stream, and marks it as this part when the timer is on.
    template <typename Work>
    auto measure(Part part, StreamView stream, const Work& work) {
        if (!on_) return work();
        const Span span{part, std::make_shared<Event>(stream.device(), true),
                        std::make_shared<Event>(stream.device(), true)};
        span.from->record(stream);
        auto result = work();
        span.to->record(stream);
        spans_.push_back(span);
        return result;
    }

    // What was marked since the last call, for a captured graph to keep: its launches record the
    // events again.
    [[nodiscard]] std::vector<Span> takeSpans() noexcept;
    void add(const std::vector<Span>& spans);

    // Seconds of each part since the last call. The stream's work is done.
    [[nodiscard]] std::array<double, part_count> take();

private:
    bool on_ = false;
    std::vector<Span> spans_;
};

}  // namespace kvgrid
