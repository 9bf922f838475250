#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <entity/Error.h>
#include <entity/HostPool.h>
#include <entity/SlabSource.h>
#include <entity/TransferBackend.h>
#include <extension/base/Fork.h>
#include <extension/base/ThreadContext.h>
#include <extension/memory/Device.h>
#include <extension/memory/Room.h>

#include "torch_harness.h"

// A device whose memory is main memory and whose copies are made by threads of their own, as a
// GPU's are by its copy engines: they are submitted, and over some time later.

/// A copy that may read what a program writes at the same time, if it has been called off: what
/// it has read is thrown away then. So it is no race, and the sanitizer is not told.
[[gnu::no_sanitize("thread"), gnu::noinline]] inline void copy_unwatched(
    volatile char* to,
    const volatile char* from,
    size_t nbytes) {
  size_t at = 0;
  for (; at + sizeof(uint64_t) <= nbytes; at += sizeof(uint64_t)) {
    *reinterpret_cast<volatile uint64_t*>(to + at) =
        *reinterpret_cast<const volatile uint64_t*>(from + at);
  }
  for (; at < nbytes; ++at) {
    to[at] = from[at];
  }
}

/// One thread that makes copies, in the order in which they were submitted.
class CopyEngine {
 public:
  class Copy final : public torch_lms::Fence {
   public:
    explicit Copy(CopyEngine& engine) : engine_(engine) {}
    bool done() noexcept override {
      return over_.load(std::memory_order_acquire);
    }
    void wait() override {
      std::unique_lock<std::mutex> lock(engine_.mutex_);
      engine_.changed_.wait(lock, [&] { return done(); });
      if (failed_) {
        throw torch_lms::TransferFailed("the fake device's copy failed");
      }
    }

   private:
    friend class CopyEngine;
    CopyEngine& engine_;
    char* to_ = nullptr;
    const char* from_ = nullptr;
    const void* block_ = nullptr;
    size_t nbytes_ = 0;
    torch_lms::FencePtr after_;
    bool failed_ = false;
    std::atomic<bool> over_{false};
  };

  CopyEngine() : thread_([this] { work(); }) {}
  ~CopyEngine() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      held_ = false;
      changed_.notify_all();
    }
    thread_.join();
  }

  torch_lms::FencePtr submit(
      void* to,
      const void* from,
      const void* block,
      size_t nbytes,
      const torch_lms::FencePtr& after) {
    auto copy = std::make_shared<Copy>(*this);
    copy->to_ = static_cast<char*>(to);
    copy->from_ = static_cast<const char*>(from);
    copy->block_ = block;
    copy->nbytes_ = nbytes;
    copy->after_ = after;
    std::lock_guard<std::mutex> lock(mutex_);
    copies_.push_back(copy);
    changed_.notify_all();
    return copy;
  }

  /// While it is set no copy begins.
  void set_held(bool held) {
    std::lock_guard<std::mutex> lock(mutex_);
    held_ = held;
    changed_.notify_all();
  }
  void fail_next() {
    std::lock_guard<std::mutex> lock(mutex_);
    fail_next_ = true;
  }
  /// Copies take a while from now on.
  void set_slow(bool slow) {
    slow_.store(slow);
  }

  bool uses(const void* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    return uses_locked(block);
  }
  void wait_until_unused(const void* block) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return !uses_locked(block); });
  }
  void wait_until_idle() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return copies_.empty(); });
  }

 private:
  bool uses_locked(const void* block) {
    return std::any_of(
        copies_.begin(), copies_.end(), [&](const auto& copy) { return copy->block_ == block; });
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopping_ || (!copies_.empty() && !held_); });
      if (copies_.empty()) {
        return;
      }
      const std::shared_ptr<Copy> copy = copies_.front();
      const bool fails = std::exchange(fail_next_, false);
      lock.unlock();
      if (copy->after_ != nullptr) {
        copy->after_->wait();
      }
      if (slow_.load()) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
      copy_unwatched(copy->to_, copy->from_, fails ? copy->nbytes_ / 2 : copy->nbytes_);
      lock.lock();
      copy->failed_ = fails;
      copy->over_.store(true, std::memory_order_release);
      copies_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Copy>> copies_; // the first is being made
  bool held_ = false;
  bool fail_next_ = false;
  bool stopping_ = false;
  std::atomic<bool> slow_{false};
  std::thread thread_;
};

/// Ops run on the threads that call them: what has been submitted is over.
class AsyncBackend final : public torch_lms::TransferBackend {
 public:
  explicit AsyncBackend(std::shared_ptr<torch_lms::HostPool> pool) : pool_(std::move(pool)) {}

  CopyEngine out;
  CopyEngine in;
  // Set while nothing is under way.
  std::function<void()> when_host_asked; ///< Before there is host memory for a page-out.
  std::function<void()> instead_of_order; ///< Where a thread is to wait for what has come in.
  std::function<torch_lms::FencePtr()> submitted; ///< What a stream has been given to do.

  bool copies_asynchronously() const noexcept override {
    return true;
  }
  void* allocate_host(size_t nbytes) override {
    if (when_host_asked != nullptr) {
      when_host_asked();
    }
    collect();
    return pool_->allocate(nbytes);
  }
  void free_host(void* host, torch_lms::FencePtr after) noexcept override {
    if (host != nullptr) {
      std::lock_guard<std::mutex> lock(mutex_);
      freed_.emplace_back(host, std::move(after));
    }
    collect();
  }
  torch_lms::FencePtr submitted_work() override {
    return submitted != nullptr ? submitted() : nullptr;
  }
  torch_lms::FencePtr copy_to_host(
      void* host,
      const void* device,
      size_t nbytes,
      const torch_lms::FencePtr& after,
      const std::atomic<bool>&) override {
    return out.submit(host, device, device, nbytes, after);
  }
  torch_lms::FencePtr copy_to_device(
      void* device,
      const void* host,
      size_t nbytes,
      const torch_lms::FencePtr& after) override {
    return in.submit(device, host, device, nbytes, after);
  }
  bool copy_on_device(void* to, const void* from, size_t nbytes) override {
    std::memcpy(to, from, nbytes);
    return true;
  }
  void order_after(const torch_lms::FencePtr& fence) override {
    if (instead_of_order != nullptr) {
      instead_of_order();
    } else if (fence != nullptr) {
      fence->wait();
    }
  }

  /// Gives back what no copy uses any more.
  void collect() noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto at = freed_.begin(); at != freed_.end();) {
      if (at->second == nullptr || at->second->done()) {
        pool_->free(at->first);
        at = freed_.erase(at);
      } else {
        ++at;
      }
    }
  }

 private:
  const std::shared_ptr<torch_lms::HostPool> pool_;
  std::mutex mutex_;
  std::list<std::pair<void*, torch_lms::FencePtr>> freed_;
};

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
    if (has_hole != nullptr && !has_hole()) {
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
  std::function<bool()> has_hole; ///< For what comes in, or is moved.
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
