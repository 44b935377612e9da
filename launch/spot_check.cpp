#include "launch/spot_check.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "launch/oracle.h"
#include "launch/parallel.h"

namespace kvgrid::launch {

namespace {

// The same on ranks with more threads and with fewer.
constexpr std::size_t units_at_once = 16;

}  // namespace

SpotCheck::SpotCheck(const Reference& reference, std::vector<Unit> units, int steps)
    : reference_(&reference),
      units_(std::move(units)),
      steps_(steps),
      unit_size_(static_cast<std::size_t>(reference.groupSize()) *
                 static_cast<std::size_t>(reference.headDim())),
      outputs_(units_.size() * static_cast<std::size_t>(steps) * unit_size_) {}

void SpotCheck::take(int layer, int step, std::span<const float> out) {
    for (std::size_t i = 0; i < units_.size(); ++i) {
        const Unit& unit = units_[i];
        if (unit.layer != layer) continue;
        const auto source =
            static_cast<std::size_t>(unit.key * reference_->kvHeads() + unit.kv_head);
        const std::size_t target =
            i * static_cast<std::size_t>(steps_) + static_cast<std::size_t>(step);
        std::copy_n(out.begin() + static_cast<std::ptrdiff_t>(source * unit_size_), unit_size_,
                    outputs_.begin() + static_cast<std::ptrdiff_t>(target * unit_size_));
    }
}

SpotCheck::Found SpotCheck::compare(std::span<const std::int64_t> lengths, double bound,
                                    int threads,
                                    const std::function<void(std::size_t)>& compared) const {
    Found all;
    std::mutex mutex;
    for (std::size_t done = 0; done < units_.size();) {
        const std::size_t count = std::min(units_at_once, units_.size() - done);
        parallelFor(threads, static_cast<std::int64_t>(count), [&](std::int64_t i) {
            const std::size_t index = done + static_cast<std::size_t>(i);
            const auto key = static_cast<std::size_t>(units_[index].key);
            const Found found = compareUnit(index, lengths[key], bound);
            const std::lock_guard lock(mutex);
            all.checked += found.checked;
            all.wrong += found.wrong;
            all.max_rel_error = std::max(all.max_rel_error, found.max_rel_error);
            all.unquantised_rel_error =
                std::max(all.unquantised_rel_error, found.unquantised_rel_error);
        });
        done += count;
        if (compared) compared(done);
    }
    return all;
}

SpotCheck::Found SpotCheck::compareUnit(std::size_t index, std::int64_t length,
                                        double bound) const {
    const Unit& unit = units_[index];
    const std::int64_t first = reference_->firstSeen(unit.layer, length - steps_);
    const Reference::KeysValues stored = reference_->keysValues(unit, first, length);
    Reference::KeysValues unquantised;
    if (reference_->quantises()) unquantised = reference_->unquantised(unit, first, length);
    const auto head_dim = static_cast<std::size_t>(reference_->headDim());
    const int group = reference_->groupSize();
    auto output = outputs_.begin() + static_cast<std::ptrdiff_t>(
                                         index * static_cast<std::size_t>(steps_) * unit_size_);
    Found found;
    for (int step = 0; step < steps_; ++step) {
        for (int head = 0; head < group; ++head) {
            const auto error_against = [&](const Reference::KeysValues& keys_values) {
                return oracle::relativeError(
                    {output, head_dim},
                    reference_->attend(unit, keys_values, unit.kv_head * group + head,
                                       length - steps_ + step));
            };
            const double error = error_against(stored);
            if (reference_->quantises())
                found.unquantised_rel_error =
                    std::max(found.unquantised_rel_error, error_against(unquantised));
            output += static_cast<std::ptrdiff_t>(head_dim);
            ++found.checked;
            if (!(error <= bound)) ++found.wrong;
            found.max_rel_error = std::max(found.max_rel_error, error);
        }
    }
    return found;
}

}  // namespace kvgrid::launch
