#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <entity/Error.h>
#include <entity/HostPool.h>
#include <entity/SlabSource.h>
#include <entity/TransferBackend.h>
#include <extension/base/ThreadContext.h>
#include <extension/memory/Device.h>
#include <extension/memory/Room.h>

#include "fake_allocator.h"

// A device whose memory is main memory and whose copies are made by threads of their own, as a
// GPU's are by its copy engines: they are submitted, and over some time later.

/// Stands for the CPU. Never destroyed.
class AsyncDevice final : public torch_lms::Device {
 public:
  AsyncDevice()
      : pool_(
            std::make_shared<torch_lms::HostPool>(
                std::make_unique<torch_lms::AnonymousSlabSource>(size_t{8} << 20),
                torch_lms::HostPoolOptions())),
        async(std::make_shared<AsyncBackend>(pool_)),
        backend_(async),
        allocator(*new FakeAllocator(*this, *async)) {
    c10::SetCPUAllocator(&allocator, 255);
  }

  c10::Device device() const override {
    return c10::Device(c10::kCPU);
  }
  const std::shared_ptr<torch_lms::TransferBackend>& backend() const override {
    return backend_;
  }
  const std::shared_ptr<torch_lms::HostPool>& pool() const override {
    return pool_;
  }
  bool owns(const c10::DataPtr& data) const override {
    return data.get() != nullptr && data.get() == data.get_context() &&
           data.get_deleter() == allocator.raw_deleter();
  }
  int64_t current_stream() const override { // one in two threads has another
    return static_cast<int64_t>(torch_lms::OpClock::this_thread() % 2);
  }
  void note_current_stream() override {
    noted_.fetch_add(1);
    if (const auto meanwhile = std::exchange(when_noted, nullptr)) {
      meanwhile();
    }
  }
  void note_busy_streams() override {}
  c10::DataPtr allocate(size_t nbytes, int64_t) override {
    if (has_hole != nullptr && !has_hole(nbytes)) {
      throw torch_lms::NoRoom("the fake device has no hole that is large enough");
    }
    return allocator.allocate(nbytes);
  }
  torch_lms::FencePtr submitted_to(int64_t) override {
    return nullptr;
  }
  void keep_block_for_copy(void* block) override {
    allocator.keep(block);
  }
  void keep_block_for_arrival(void* block) override {
    allocator.keep(block);
    if (const auto meanwhile = std::exchange(when_kept, nullptr)) {
      meanwhile();
    }
  }
  void keep_block_for_streams(void*) override {
    allocator.touch_lock();
    if (const auto meanwhile = std::exchange(when_used_by_streams, nullptr)) {
      meanwhile();
    }
  }
  torch_lms::DeviceUse use() const override {
    return allocator.use();
  }
  void reset_peak() override {
    allocator.reset_peak();
  }
  bool has_contiguous(size_t) const override {
    return is_fragmented == nullptr || !is_fragmented();
  }
  std::vector<std::vector<torch_lms::AllocatorBlock>> blocks() const override {
    return shown_blocks != nullptr ? shown_blocks() : decltype(shown_blocks())();
  }
  std::shared_ptr<torch_lms::TimeMark> mark_time() override {
    return std::make_shared<TickMark>(ticks.load(), behind);
  }
  std::chrono::microseconds let_host_lead() override {
    ++leads;
    return lead;
  }
  size_t total_bytes() const override {
    return size_t{1} << 30;
  }
  void limit(size_t limit_bytes, torch_lms::Room& room) override {
    grant(0, 0);
    allocator.room.store(&room);
    limit_bytes_.store(limit_bytes);
  }
  void unlimit() override {
    limit_bytes_.store(0);
    allocator.room.store(nullptr);
  }
  bool capturing() const override {
    return captures.load();
  }

  std::atomic<bool> captures{false};
  // Set while no other thread allocates.
  std::function<bool(size_t)> has_hole; ///< For what comes in, or is moved.
  std::function<bool()> is_fragmented;
  std::function<void()> when_noted; ///< When a stream is noted next.
  std::function<void()> when_kept; ///< When a block is kept next for a copy that fills it.
  std::function<void()> when_used_by_streams; ///< When one is next for the streams that use it.
  std::function<std::vector<std::vector<torch_lms::AllocatorBlock>>()> shown_blocks;
  std::atomic<int64_t> ticks{0}; ///< What its clock shows.
  std::atomic<int> leads{0};
  std::chrono::microseconds lead{1}; ///< How long the device says that it waits.
  std::atomic<bool> behind{false}; ///< Whether it has not reached any mark.

 private:
  struct TickMark final : torch_lms::TimeMark {
    TickMark(int64_t now, const std::atomic<bool>& is_behind) : at(now), behind(is_behind) {}
    double us_since(const torch_lms::TimeMark& earlier) const override {
      return static_cast<double>(at - static_cast<const TickMark&>(earlier).at);
    }
    bool passed() const override {
      return !behind.load();
    }
    const int64_t at;
    const std::atomic<bool>& behind;
  };

  const std::shared_ptr<torch_lms::HostPool> pool_;

 public:
  const std::shared_ptr<AsyncBackend> async;

 private:
  const std::shared_ptr<torch_lms::TransferBackend> backend_;

 public:
  FakeAllocator& allocator; ///< Never destroyed: its blocks outlive everything.

 private:
  std::atomic<size_t> noted_{0};
};
