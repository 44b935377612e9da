#include <kvgrid/cache.h>

namespace kvgrid {

Requests& Requests::allocate(std::int64_t max_length, int priority) {
    requests_.push_back(
        {.kind = Request::Kind::allocate, .tokens = max_length, .priority = priority});
    return *this;
}

Requests& Requests::release(SequenceId sequence) {
    requests_.push_back({.kind = Request::Kind::release, .sequence = sequence});
    return *this;
}

Requests& Requests::pause(SequenceId sequence) {
    requests_.push_back({.kind = Request::Kind::pause, .sequence = sequence});
    return *this;
}

Requests& Requests::resume(SequenceId sequence) {
    requests_.push_back({.kind = Request::Kind::resume, .sequence = sequence});
    return *this;
}

Requests& Requests::run(SequenceId sequence, std::int64_t new_tokens) {
    requests_.push_back({.kind = Request::Kind::run, .sequence = sequence, .tokens = new_tokens});
    return *this;
}

}  // namespace kvgrid
