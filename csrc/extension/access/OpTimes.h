#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <extension/memory/Device.h>
#include <extension/transfer/ActionTimes.h>

namespace torch_lms {

/// Note [A lead for the host]
/// Where the host submits no faster than the device runs, a part of an op's time would be the
/// host's. So the device waits for a moment before it runs an op, and the host submits that op, and
/// more, meanwhile. While the device has not begun to wait, or has for less than half of the
/// moment, the host is far enough ahead for the next op. A wait before every op would make the
/// cycle as long as all of them together: thousands.

/// What one cycle has taken; by place.
struct CycleTimes {
  std::vector<double> device_us; ///< 0 for ops that did not run. Empty if it was not timed.
  std::vector<double> host_us; ///< Until the next op begins, without waits, actions and timing.
  std::vector<bool> caught_up; ///< The device had done all before when the host began the op.
};

/// How long the ops of one cycle take on a device and on its host, without what they wait for.
///
/// Thread-safe: every method may be called from any thread; ops of several threads at once have
/// times that mean nothing. Blocks on a mutex, under which only the device's clock is asked.
class OpTimes {
 public:
  /// `actions`: which are no part of an op's time on the host; null if there are none.
  explicit OpTimes(ActionTimes* actions = nullptr) : actions_(actions) {}

  enum class Lead : uint8_t {
    kMade, ///< See Note [A lead for the host].
    kThere, ///< The host is ahead.
  };

  void begin(Device& device, Lead lead);
  void abandon();
  bool on() const noexcept {
    return on_.load(std::memory_order_acquire);
  }

  /// The op at a place of the cycle begins, and ends.
  void begin_op(int32_t place);
  void end_op(int32_t place);
  /// The op that runs stops meanwhile, and goes on when every pause has ended: what is done for
  /// room while an op waits for it waits for room itself. No effect where none runs.
  void pause(Device& device);
  void resume(Device& device) noexcept;

  /// The cycle of so many ops has ended. Waits for the device. Empty if it was not timed, or if a
  /// graph was captured meanwhile.
  CycleTimes end(size_t places);

 private:
  using Clock = std::chrono::steady_clock;

  /// A time in which an op runs.
  struct Span {
    int32_t place;
    std::shared_ptr<TimeMark> begin;
    std::shared_ptr<TimeMark> end;
  };

  /// From when the host begins an op until it begins the next.
  struct HostSpan {
    int32_t place;
    bool caught_up;
    Clock::time_point begin;
    std::chrono::nanoseconds others; ///< Of it, which are not the op's.
  };

  /// While one lives, what the host does is timing.
  class Own;

  void open_span_locked(int32_t place);
  void open_host_span_locked(int32_t place, Clock::time_point now);
  void close_host_span_locked(Clock::time_point now);
  void keep_lead_locked();

  std::atomic<bool> on_{false};
  std::mutex mutex_; // guards what follows
  Device* device_ = nullptr;
  Lead lead_ = Lead::kThere;
  std::shared_ptr<TimeMark> wait_; // where the device begins to wait; null before the first
  Clock::time_point enough_until_; // if it began to wait at once
  int waits_ = 0; // pauses that have not ended
  bool paused_ = false; // the first of them found an op that ran
  std::vector<Span> spans_; // only the last may be open
  ActionTimes* const actions_;
  std::chrono::nanoseconds acted_{0}; // by actions, when the last host span began
  std::shared_ptr<TimeMark> before_; // where the cycle begins
  Clock::time_point wait_began_; // the first of the waits that have not ended
  std::vector<HostSpan> host_spans_;
};

} // namespace torch_lms
