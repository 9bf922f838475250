#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <extension/memory/Device.h>

namespace torch_lms {

/// Note [A lead for the host]
/// Where the host submits no faster than the device runs, a part of an op's time would be the
/// host's. So the device waits for a moment before it runs an op, and the host submits that op, and
/// more, meanwhile. While the device has not begun to wait, or has for less than half of the
/// moment, the host is far enough ahead for the next op. A wait before every op would make the
/// cycle as long as all of them together: thousands.

/// How long the ops of one cycle take on a device, without what they wait for.
///
/// Thread-safe: every method may be called from any thread; ops of several threads at once have
/// times that mean nothing. Blocks on a mutex, under which only the device's clock is asked.
class OpTimes {
 public:
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

  /// The cycle of so many ops has ended: times in us, by place; 0 for those that did not run. Waits
  /// for the device. Empty if it was not timed, or if a graph was captured meanwhile.
  std::vector<double> end(size_t places);

 private:
  using Clock = std::chrono::steady_clock;

  /// A time in which an op runs.
  struct Span {
    int32_t place;
    std::shared_ptr<TimeMark> begin;
    std::shared_ptr<TimeMark> end;
  };

  void open_span_locked(int32_t place);
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
};

} // namespace torch_lms
