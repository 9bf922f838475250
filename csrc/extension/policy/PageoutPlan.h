#pragma once

#include <cstddef>
#include <cstdint>

namespace torch_lms {

/// How much has to go out in a forward, from what went out in the one before.
///
/// Note [Planned page-outs]
/// From the second cycle on it is known how much must go out in a forward: entities go as
/// soon as they have cooled, not when memory is full, so that the link is busy from the
/// start. The plan is what was asked for the last time, less what was called off because it
/// was used again, and less what the peak of the memory that stayed has left unused. Only
/// forward counts: room that backward needs for a moment must be in one piece, and what
/// goes out early for it would leave it in many. Nothing is planned for a program without
/// backwards: all that it holds is needed in each pass, and what goes early is to come again.
///
/// Not thread-safe: its owner's mutex guards it.
class PageoutPlan {
 public:
  /// A page-out has been asked for, or one that was asked for has been called off.
  void note_request(size_t nbytes) noexcept {
    requested_bytes_ += nbytes;
  }
  void note_cancelled(size_t nbytes) noexcept {
    requested_bytes_ -= nbytes < requested_bytes_ ? nbytes : requested_bytes_;
  }

  /// What stays on the device when every page-out under way is over.
  void note_stays(size_t nbytes) noexcept {
    peak_bytes_ = nbytes > peak_bytes_ ? nbytes : peak_bytes_;
  }

  /// A cycle has ended in which up to `target_bytes` could have stayed.
  void end_cycle(size_t target_bytes) noexcept {
    const size_t unneeded = target_bytes > peak_bytes_ ? target_bytes - peak_bytes_ : 0;
    planned_bytes_ = requested_bytes_ > unneeded ? requested_bytes_ - unneeded : 0;
    requested_bytes_ = 0;
    peak_bytes_ = 0;
  }

  /// What is planned for this cycle and has not been asked for yet.
  size_t missing_bytes() const noexcept {
    return planned_bytes_ > requested_bytes_ ? planned_bytes_ - requested_bytes_ : 0;
  }

 private:
  size_t requested_bytes_ = 0; // in this cycle
  size_t planned_bytes_ = 0; // for this cycle
  size_t peak_bytes_ = 0; // in this cycle
};

} // namespace torch_lms
