#pragma once

#include <array>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include <entity/Error.h>
#include <entity/TransferBackend.h>

#include "harness.h"
#include "interruptions.h"

enum class Stream : size_t { kProgram, kOut, kIn };
enum class Work { kPending, kDone, kFailed };

/// Three streams of work that runs only when somebody waits for it, or a test says so:
/// what needs the bytes and does not wait, finds that they have not come.
struct Timeline {
  class Item;
  std::mutex mutex;
  std::condition_variable changed;
  std::array<std::deque<std::shared_ptr<Item>>, 3> streams;
  bool held = false; ///< While it is set nothing runs, and who waits, waits.
};

class Timeline::Item final : public torch_lms::Fence {
 public:
  Item(std::shared_ptr<Timeline> timeline, Stream stream, torch_lms::FencePtr after)
      : timeline_(std::move(timeline)),
        stream_(static_cast<size_t>(stream)),
        after_(std::static_pointer_cast<Item>(std::move(after))) {}

  bool done() noexcept override {
    std::lock_guard<std::mutex> lock(timeline_->mutex);
    return state_ != Work::kPending;
  }

  void wait() override {
    std::unique_lock<std::mutex> lock(timeline_->mutex);
    timeline_->changed.wait(lock, [&] { return state_ != Work::kPending || !timeline_->held; });
    run_locked();
    if (state_ == Work::kFailed) {
      throw torch_lms::TransferFailed("the copy failed on its stream");
    }
  }

  void run() {
    std::lock_guard<std::mutex> lock(timeline_->mutex);
    run_locked();
  }

  void copies(void* to, const void* from, size_t nbytes, bool fails) {
    to_ = to;
    from_ = from;
    nbytes_ = nbytes;
    fails_ = fails;
  }

 private:
  void run_locked() {
    auto& stream = timeline_->streams[stream_];
    while (state_ == Work::kPending) {
      const std::shared_ptr<Item> oldest = stream.front();
      stream.pop_front();
      if (oldest->after_ != nullptr) {
        oldest->after_->run_locked();
      }
      if (oldest->to_ != nullptr) {
        std::memcpy(
            oldest->to_, oldest->from_, oldest->fails_ ? oldest->nbytes_ / 2 : oldest->nbytes_);
      }
      oldest->state_ = oldest->fails_ ? Work::kFailed : Work::kDone;
      oldest->after_ = nullptr;
    }
    timeline_->changed.notify_all();
  }

  const std::shared_ptr<Timeline> timeline_;
  const size_t stream_;
  std::shared_ptr<Item> after_;
  void* to_ = nullptr;
  const void* from_ = nullptr;
  size_t nbytes_ = 0;
  bool fails_ = false;
  Work state_ = Work::kPending;
};

/// Where a `FakeBackend` can be interrupted; copies in their middle.
enum class BackendStep { kAllocateHost, kSubmittedWork, kCopyToHost, kCopyToDevice, kOrderAfter };

enum class Copies { kOnCaller, kOnStreams };

/// A device whose copies come when they are told to, and fail when they are told to. It
/// reports host memory that is freed twice or was never had, and keeps what a pending
/// copy needs. Thread-safe.
class FakeBackend final : public torch_lms::TransferBackend {
 public:
  using FencePtr = torch_lms::FencePtr;

  explicit FakeBackend(Copies copies) : copies_(copies) {}
  ~FakeBackend() override {
    for (auto& items : timeline_->streams) {
      items.clear(); // they hold the timeline
    }
    for (void* host : hosts_) {
      std::free(host);
    }
  }

  Interruptions<BackendStep> interruptions;

  bool copies_asynchronously() const noexcept override {
    return copies_ == Copies::kOnStreams;
  }

  void* allocate_host(size_t nbytes) override {
    interruptions.reached(BackendStep::kAllocateHost);
    std::lock_guard<std::mutex> lock(mutex_);
    if (hosts_.size() >= most_hosts_) {
      throw torch_lms::HostPoolFull("the fake host memory is full");
    }
    void* host = std::malloc(nbytes + 1);
    std::memset(host, 0xAB, nbytes + 1);
    hosts_.insert(host);
    return host;
  }

  void free_host(void* host, FencePtr after) noexcept override {
    if (host == nullptr) {
      return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    CHECK(hosts_.count(host) == 1);
    freed_.emplace_back(host, std::move(after));
    collect_locked();
  }

  FencePtr submitted_work() override {
    interruptions.reached(BackendStep::kSubmittedWork);
    return copies_ == Copies::kOnCaller ? nullptr : submit(Stream::kProgram, nullptr);
  }

  FencePtr copy_to_host(
      void* host,
      const void* device,
      size_t nbytes,
      const FencePtr& after,
      const std::atomic<bool>& cancelled) override {
    if (copies_ == Copies::kOnCaller) {
      std::memcpy(host, device, nbytes / 2);
      interruptions.reached(BackendStep::kCopyToHost);
      if (!cancelled.load()) {
        std::memcpy(
            static_cast<char*>(host) + nbytes / 2,
            static_cast<const char*>(device) + nbytes / 2,
            nbytes - nbytes / 2);
      }
      return nullptr;
    }
    interruptions.reached(BackendStep::kCopyToHost);
    return submit(Stream::kOut, after, host, device, nbytes);
  }

  FencePtr copy_to_device(void* device, const void* host, size_t nbytes, const FencePtr& after)
      override {
    if (copies_ == Copies::kOnCaller) {
      std::memcpy(device, host, nbytes / 2);
      interruptions.reached(BackendStep::kCopyToDevice);
      std::memcpy(
          static_cast<char*>(device) + nbytes / 2,
          static_cast<const char*>(host) + nbytes / 2,
          nbytes - nbytes / 2);
      return nullptr;
    }
    interruptions.reached(BackendStep::kCopyToDevice);
    return submit(Stream::kIn, after, device, host, nbytes);
  }

  /// The calling thread's work is what its test does next, so the fence passes first.
  void order_after(const FencePtr& fence) override {
    interruptions.reached(BackendStep::kOrderAfter);
    std::static_pointer_cast<Timeline::Item>(fence)->run();
  }

  // --- for tests ---

  void set_most_hosts(size_t count) {
    std::lock_guard<std::mutex> lock(mutex_);
    most_hosts_ = count;
  }

  /// Host blocks in use, or that a pending copy may still read.
  size_t hosts() {
    std::lock_guard<std::mutex> lock(mutex_);
    collect_locked();
    return hosts_.size();
  }

  /// The next copy that is submitted to a stream fails there, half done.
  void fail_next_copy() {
    std::lock_guard<std::mutex> lock(mutex_);
    fail_next_ = true;
  }

  /// While it is set no fence passes.
  void set_held(bool held) {
    std::lock_guard<std::mutex> lock(timeline_->mutex);
    timeline_->held = held;
    timeline_->changed.notify_all();
  }

  /// Runs the oldest work of a stream. Returns false if there is none.
  bool run_oldest(Stream stream) {
    std::shared_ptr<Timeline::Item> oldest;
    {
      std::lock_guard<std::mutex> lock(timeline_->mutex);
      auto& items = timeline_->streams[static_cast<size_t>(stream)];
      if (items.empty()) {
        return false;
      }
      oldest = items.front();
    }
    oldest->run();
    return true;
  }

  void run_all() {
    while (run_oldest(Stream::kProgram) || run_oldest(Stream::kOut) || run_oldest(Stream::kIn)) {
    }
  }

 private:
  FencePtr submit(
      Stream stream,
      const FencePtr& after,
      void* to = nullptr,
      const void* from = nullptr,
      size_t nbytes = 0) {
    bool fails = false;
    if (to != nullptr) {
      std::lock_guard<std::mutex> lock(mutex_);
      std::swap(fails, fail_next_);
    }
    auto item = std::make_shared<Timeline::Item>(timeline_, stream, after);
    item->copies(to, from, nbytes, fails);
    std::lock_guard<std::mutex> lock(timeline_->mutex);
    timeline_->streams[static_cast<size_t>(stream)].push_back(item);
    return item;
  }

  void collect_locked() {
    for (size_t i = 0; i < freed_.size();) {
      if (freed_[i].second != nullptr && !freed_[i].second->done()) {
        ++i;
        continue;
      }
      hosts_.erase(freed_[i].first);
      std::free(freed_[i].first);
      freed_.erase(freed_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }

  const Copies copies_;
  const std::shared_ptr<Timeline> timeline_ = std::make_shared<Timeline>();
  std::mutex mutex_;
  std::set<void*> hosts_;
  std::vector<std::pair<void*, FencePtr>> freed_;
  size_t most_hosts_ = SIZE_MAX;
  bool fail_next_ = false;
};
