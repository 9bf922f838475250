#pragma once

#include <cstdlib>
#include <new>

// Replaces the program's `new`, so that a chosen allocation fails. For one file.

/// Allocations of this thread until one fails; negative for none that fails.
inline long& allocations_until_failure() {
  static thread_local long left = -1;
  return left;
}

/// While it lives, one allocation of the calling thread fails: the `nth` from now.
class FailingNew {
 public:
  explicit FailingNew(long nth) {
    allocations_until_failure() = nth;
  }
  ~FailingNew() {
    allocations_until_failure() = -1;
  }
  FailingNew(const FailingNew&) = delete;
  FailingNew& operator=(const FailingNew&) = delete;

  bool failed() const {
    return allocations_until_failure() < 0;
  }
};

[[gnu::noinline]] void* operator new(std::size_t nbytes) {
  long& left = allocations_until_failure();
  if (left >= 0 && left-- == 0) {
    throw std::bad_alloc();
  }
  void* data = std::malloc(nbytes);
  if (data == nullptr) {
    throw std::bad_alloc();
  }
  return data;
}

[[gnu::noinline]] void operator delete(void* data) noexcept {
  std::free(data);
}

[[gnu::noinline]] void operator delete(void* data, std::size_t) noexcept {
  std::free(data);
}
