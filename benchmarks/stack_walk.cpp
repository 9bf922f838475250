// What a walk of the calling thread's stack takes, in microseconds, in both ways.

#include <chrono>
#include <cstdint>

#include <extension/base/StackWalk.h>

namespace {

bool count(const torch_lms::StackFrame&, void* frames) {
  ++*static_cast<int64_t*>(frames);
  return true;
}

bool lasts(uintptr_t, void*) {
  return true; // nothing is unloaded here
}

template <typename Walk>
double mean_us(int64_t walks, int64_t* frames, Walk&& walk) {
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < walks; ++i) {
    *frames = 0;
    walk(frames);
  }
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  return took.count() / static_cast<double>(walks);
}

} // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED double walk_by_rules_us(int64_t walks, int64_t* frames) {
  return mean_us(walks, frames, [](void* count_of) {
    torch_lms::walk_stack_by_rules(&count, &lasts, count_of);
  });
}

EXPORTED double walk_by_unwinder_us(int64_t walks, int64_t* frames) {
  return mean_us(
      walks, frames, [](void* count_of) { torch_lms::walk_stack_by_unwinder(&count, count_of); });
}
