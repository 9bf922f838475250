#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include <entity/Error.h>
#include <entity/SlabSource.h>

/// What a source was asked for. It outlives the pool that owns the source.
struct SourceRecord {
  size_t outstanding_bytes = 0;
  size_t peak_bytes = 0;
  size_t acquired = 0;
  size_t released = 0;
  size_t most_bytes = SIZE_MAX; ///< Requests above it fail.
  std::map<char*, size_t> slabs;

  bool hold = false; ///< Acquisitions and releases wait while it is set.
  size_t waiting = 0;
  std::mutex mutex;
  std::condition_variable changed;

  void set_hold(bool value) {
    std::lock_guard<std::mutex> lock(mutex);
    hold = value;
    changed.notify_all();
  }
  void wait_while_held(std::unique_lock<std::mutex>& lock) {
    ++waiting;
    changed.notify_all();
    changed.wait(lock, [&] { return !hold; });
    --waiting;
  }
  void wait_for_waiting(size_t count) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return waiting >= count; });
  }
};

/// Slabs side by side in one piece of address space, the lowest free place first, so
/// that slabs are neighbours as they seldom are in earnest.
class FakeSlabSource final : public torch_lms::SlabSource {
 public:
  FakeSlabSource(SourceRecord& record, size_t slab_bytes, size_t space_bytes = size_t{1} << 32)
      : record_(record), slab_bytes_(slab_bytes), space_bytes_(space_bytes) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* space = mmap(nullptr, space_bytes_, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (space == MAP_FAILED) {
      throw std::runtime_error("expected to map the tests' space");
    }
    space_ = static_cast<char*>(space);
  }
  ~FakeSlabSource() override {
    munmap(space_, space_bytes_);
  }

  torch_lms::Slab acquire(size_t nbytes) override {
    std::unique_lock<std::mutex> lock(record_.mutex);
    record_.wait_while_held(lock);
    char* at = find_place(nbytes);
    if (nbytes > record_.most_bytes || at == nullptr) {
      throw torch_lms::TransferFailed("expected less than " + std::to_string(nbytes) + " bytes");
    }
    record_.slabs.emplace(at, nbytes);
    ++record_.acquired;
    record_.outstanding_bytes += nbytes;
    record_.peak_bytes = std::max(record_.peak_bytes, record_.outstanding_bytes);
    torch_lms::Slab slab;
    slab.data = at;
    slab.nbytes = nbytes;
    return slab;
  }

  void release(torch_lms::Slab& slab) noexcept override {
    std::unique_lock<std::mutex> lock(record_.mutex);
    record_.wait_while_held(lock);
    madvise(slab.data, slab.nbytes, MADV_DONTNEED);
    record_.slabs.erase(static_cast<char*>(slab.data));
    ++record_.released;
    record_.outstanding_bytes -= slab.nbytes;
    slab = torch_lms::Slab();
  }
  const char* name() const noexcept override {
    return "fake memory";
  }
  size_t slab_bytes() const noexcept override {
    return slab_bytes_;
  }

 private:
  /// The lowest gap; null if there is none.
  char* find_place(size_t nbytes) const {
    char* at = space_;
    for (const auto& slab : record_.slabs) {
      if (slab.first - at >= static_cast<std::ptrdiff_t>(std::min(nbytes, space_bytes_ + 1))) {
        break;
      }
      at = slab.first + slab.second;
    }
    return nbytes <= space_bytes_ - static_cast<size_t>(at - space_) ? at : nullptr;
  }

  SourceRecord& record_;
  const size_t slab_bytes_;
  const size_t space_bytes_;
  char* space_;
};
