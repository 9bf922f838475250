#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include <entity/Error.h>
#include <entity/HostPool.h>
#include <entity/TransferBackend.h>

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
