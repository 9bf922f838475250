#pragma once

#include <cstdlib>
#include <new>

// Replaces the program's `new`, so that a chosen allocation fails. For one file.

/// Which allocations may fail, by where they are made; null for all.
inline bool (*&may_fail())(const void* caller) {
  static bool (*decide)(const void* caller) = nullptr;
  return decide;
}

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

/// Null if it is to fail.
inline void* allocate_or_fail(std::size_t nbytes, const void* caller) {
  long& left = allocations_until_failure();
  const bool counts = left >= 0 && (may_fail() == nullptr || may_fail()(caller));
  return counts && left-- == 0 ? nullptr : std::malloc(nbytes);
}

[[gnu::noinline]] void* operator new(std::size_t nbytes) {
  void* data = allocate_or_fail(nbytes, __builtin_return_address(0));
  if (data == nullptr) {
    throw std::bad_alloc();
  }
  return data;
}

[[gnu::noinline]] void* operator new(std::size_t nbytes, const std::nothrow_t&) noexcept {
  return allocate_or_fail(nbytes, __builtin_return_address(0));
}

[[gnu::noinline]] void operator delete(void* data) noexcept {
  std::free(data);
}

[[gnu::noinline]] void operator delete(void* data, std::size_t) noexcept {
  std::free(data);
}

[[gnu::noinline]] void operator delete(void* data, const std::nothrow_t&) noexcept {
  std::free(data);
}
