#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include <extension/policy/PolicyState.h>
#include <extension/policy/Wakefulness.h>

namespace torch_lms {

/// Note [What goes out, and what comes back]
/// Under pressure the entities that are needed last go out (Belady's rule, by the
/// expectations of Note [The next use]). In a forward these are the activations of the
/// first layers. What comes back first is what is needed first, as memory becomes free,
/// but for a reserve for what the next ops allocate; a prefetch that has not begun is
/// called off before anything goes out for want of room.
///
/// What recurs (parameters) and is still needed in this cycle goes last: it is small beside
/// the activations, and would come back scattered over memory, which fragments it.
///
/// Without backwards (inference) what is held beyond the limit comes in once in each pass, if the
/// rest stays: of weights that are used in turn, those that have just been used go. They are also
/// the last to be needed of all that is out, and would fill whatever room an op leaves, to go again
/// with the next one: so nothing comes back that is nearer to its last use than to its next.

/// What goes out: requests it, waits for it, and keeps what failed.
///
/// Thread-safe: every method may be called from any thread, `wait` and `others_may_let_go` without
/// the GIL. These wait; the others block on nothing but mutexes.
class Pageouts {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Progress { kMoved, kNothingUnderWay, kFailed };

  Pageouts(PolicyState& state, Wakefulness& wakefulness)
      : state_(state), wakefulness_(wakefulness) {}

  /// Returns the bytes that go, or have gone.
  size_t page_out(Device& device, const std::vector<EntityPtr>& entities);
  /// The same of so many bytes of what is needed last; where the host has little room left, of what
  /// can be dropped first. Nothing larger than `most_bytes` is copied out.
  size_t request(Device& device, size_t nbytes, size_t most_bytes = SIZE_MAX);

  /// Waits until a page-out is over and commits: until `deadline`, or `PolicyOptions::patience`.
  /// `progress`: of the queue, as far as the caller has seen it.
  Progress wait(uint64_t* progress, Clock::time_point deadline);
  /// Until no page-out is under way that goes on.
  void wait_for_all(uint64_t* progress, Clock::time_point deadline);

  /// Nothing can go out now, but other threads' ops hold their inputs only until they end, and what
  /// other threads are about to page out is in no queue yet. Waits a moment; false if that has been
  /// `since` too long.
  bool others_may_let_go(Clock::time_point since);

  /// Failures count from now on.
  void forget_errors();
  /// The text of the last failure; empty if there was none.
  std::string last_error();

 private:
  size_t page_out(Device& device, const std::vector<EntityPtr>& entities, bool host_is_short);
  bool keep_error();
  bool host_is_short(const Device& device);
  size_t drop(Device& device, size_t nbytes);

  PolicyState& state_;
  Wakefulness& wakefulness_;
  std::atomic<bool> refused_{false}; // by the host, since `forget_errors`
  std::mutex error_mutex_;
  std::string last_error_;
};

} // namespace torch_lms
