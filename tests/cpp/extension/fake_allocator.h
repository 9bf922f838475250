#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>
#include <entity/Error.h>
#include <extension/base/Fork.h>
#include <extension/base/ThreadContext.h>
#include <extension/memory/Device.h>
#include <extension/memory/Room.h>

#include "fake_copies.h"
#include "torch_harness.h"

/// PyTorch's allocator of main memory, made to behave as one of a GPU's: it has a lock, under
/// which it asks for finished page-outs, and blocks that copies use must not go. Thread-safe.
class FakeAllocator final : public c10::Allocator {
 public:
  FakeAllocator(torch_lms::Device& device, AsyncBackend& backend)
      : device_(device), backend_(backend) {
    instance() = this;
  }

  std::atomic<torch_lms::Room*> room{nullptr};

  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device cpu(c10::kCPU);
    if (nbytes == 0) {
      return {nullptr, nullptr, &free_block, cpu};
    }
    torch_lms::Room* asked = torch_lms::in_forked_child() ? nullptr : room.load();
    if (asked != nullptr && device_.limit_bytes() != 0) {
      reserve_within_limit(*asked, nbytes);
    } else {
      allocated_.fetch_add(nbytes);
    }
    auto* header = static_cast<Header*>(aligned_alloc(64, (kHeaderBytes + nbytes + 63) / 64 * 64));
    TORCH_CHECK(header != nullptr);
    header->nbytes.store(nbytes, std::memory_order_release);
    char* data = reinterpret_cast<char*>(header) + kHeaderBytes;
    std::memset(data, 0xCD, nbytes);
    return {data, data, &free_block, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }

  void keep(const void* block) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    kept_.insert(block);
  }
  torch_lms::DeviceUse use() const {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return {allocated_, peak_, allocated_};
  }
  void reset_peak() {
    peak_.store(allocated_.load());
  }
  void touch_lock() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
  }

 private:
  static constexpr size_t kHeaderBytes = 64;
  struct Header {
    std::atomic<size_t> nbytes; // what orders the thread that frees it is in PyTorch, and not seen
  };

  static FakeAllocator*& instance() {
    static FakeAllocator* allocator = nullptr;
    return allocator;
  }

  static void free_block(void* data) {
    if (data != nullptr) {
      instance()->free(data);
    }
  }

  void free(void* data) {
    auto* header = reinterpret_cast<Header*>(static_cast<char*>(data) - kHeaderBytes);
    const size_t nbytes = header->nbytes.load(std::memory_order_acquire);
    if (!torch_lms::in_forked_child()) { // whose locks may be held by nobody
      bool kept = false;
      {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        kept = kept_.erase(data) != 0;
      }
      for (CopyEngine* engine : {&backend_.out, &backend_.in}) {
        if (kept) {
          engine->wait_until_unused(data);
        } else {
          CHECK(!engine->uses(data));
        }
      }
    }
    std::memset(data, 0xDD, nbytes);
    std::free(header);
    allocated_.fetch_sub(nbytes);
  }

  bool reserve(size_t nbytes, size_t limit_bytes) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (limit_bytes != 0 && allocated_ + nbytes > limit_bytes) {
      return false;
    }
    allocated_ += nbytes;
    peak_ = std::max<size_t>(peak_, allocated_);
    return true;
  }

  void reserve_within_limit(torch_lms::Room& asked, size_t nbytes) {
    using Answer = torch_lms::Room::Answer;
    if (torch_lms::this_thread().for_prefetch) {
      if (!reserve(nbytes, device_.limit_bytes())) {
        throw torch_lms::NoRoom("the fake device has no room for a prefetch");
      }
      return;
    }
    Answer answer = Answer::kFits;
    for (int tries = 0; tries < 1000 && answer == Answer::kFits; ++tries) {
      answer = device_.spend(nbytes) ? Answer::kFits : asked.make_room(device_, nbytes);
      if (answer == Answer::kFits) {
        asked.make_contiguous(device_, nbytes);
      }
      std::lock_guard<std::recursive_mutex> lock(mutex_);
      asked.vacate_finished(device_);
      if (reserve(nbytes, answer == Answer::kGiveWay ? 0 : device_.limit_bytes())) {
        return;
      }
    }
    TORCH_CHECK_WITH(OutOfMemoryError, false, asked.explain(device_, nbytes));
  }

  torch_lms::Device& device_;
  AsyncBackend& backend_;
  mutable std::recursive_mutex mutex_;
  std::set<const void*> kept_;
  std::atomic<size_t> allocated_{0};
  std::atomic<size_t> peak_{0};
};
