#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

#include <ATen/record_function.h>

#include <extension/access/Recipes.h>
#include <extension/policy/Policy.h>
#include <extension/transfer/Pager.h>

namespace torch_lms {

/// When ops are observed: one global RecordFunction callback comes and goes. It changes no dispatch
/// keys and sees every thread.
///
/// The callback is installed while something is paged out or on its way, and while automatic mode
/// learns or is armed; otherwise ops cost nothing. Ops that were running when it was installed
/// are not observed.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. They block on
/// a mutex, under which PyTorch's own lock of callbacks is taken; `Request` and `hold` wait, and
/// say so.
class OpCallbacks final : public OpFeed {
 public:
  using Begin = at::RecordFunctionCallback::StartCallback;
  using End = at::RecordFunctionCallback::EndCallback;

  /// `begin` and `end` are called for every op that is observed.
  OpCallbacks(Pager& pager, Recipes& recipes, Begin begin, End end)
      : pager_(pager), recipes_(recipes), begin_(begin), end_(end) {}

  // --- OpFeed: automatic mode ---
  void start() override;
  void stop() override;

  /// Ops are observed while one of these lives, and from then on as long as there is reason to. To
  /// make one may wait for ops that began unseen, for up to a second, and take the GIL: without
  /// it, and with no lock held. Where ops have been observed since the last one there is nothing to
  /// wait for.
  class Request {
   public:
    explicit Request(OpCallbacks& callbacks);
    ~Request();
    Request(const Request&) = delete;
    Request& operator=(const Request&) = delete;

   private:
    OpCallbacks& callbacks_;
  };

  /// Removes the callback if there is no more reason for it.
  void stop_if_idle();

  /// Something is asked for by hand, during a `Request`: beside other threads of Python's ops stay
  /// observed until `end_requests`.
  void note_by_hand() noexcept {
    by_hand_ = true;
  }

  /// Whether Python has other threads than the one that asks now: see Note [Ops that began unseen].
  /// False where nobody says it. Blocks on nothing.
  void note_other_threads(bool others) noexcept {
    other_threads_.store(others, std::memory_order_relaxed);
  }

  /// What was asked for by hand is over: all has been brought back, or nothing has been out for a
  /// while.
  void end_requests();

  /// The callback neither comes nor goes until `release`, and threads have learnt of the last
  /// change: see Note [Locks that a forked child takes]. Waits for up to a millisecond.
  void hold();
  void release();

  /// How often ops that began unseen were waited for, and how often it took too long.
  struct Waits {
    uint64_t all;
    uint64_t in_vain;
  };
  Waits waits() const noexcept {
    return {waits_.load(), waits_in_vain_.load()};
  }

  /// Blocks on nothing.
  bool observing() const noexcept {
    return installed_.load(std::memory_order_acquire);
  }

 private:
  void install(bool outputs);
  void uninstall();
  bool wanted() const;
  void begin_request();
  void end_request();
  void settle();

  Pager& pager_;
  Recipes& recipes_;
  const Begin begin_;
  const End end_;
  std::mutex mutex_; // of who installs and removes
  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
  bool outputs_ = false;
  std::chrono::steady_clock::time_point changed_at_{}; // when it came or went
  std::atomic<bool> fed_{false}; // by `start`
  std::atomic<bool> installed_{false};
  std::atomic<size_t> requests_{0};
  std::atomic<bool> by_hand_{false}; // since `end_requests`
  std::atomic<bool> other_threads_{false};
  std::mutex settling_; // the GIL is taken under it, never the other way around
  std::atomic<bool> settled_{false}; // nothing that a request must know of is still unseen
  std::atomic<uint64_t> waits_{0};
  std::atomic<uint64_t> waits_in_vain_{0};
};

} // namespace torch_lms
