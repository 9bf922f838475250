#pragma once

#include <cstddef>
#include <string>

namespace torch_lms {

class Device;

/// Who makes room on a device before its allocator hands out memory. The allocators call it;
/// the policy is it.
///
/// The first three may wait for transfers and for other threads' ops, within the bounds of
/// `PolicyOptions`; they let go of Python's lock meanwhile. No lock may be held.
class Room {
 public:
  enum class Answer {
    kFits, ///< There is room within the limit.
    kGiveWay, ///< Nothing may be vacated now (Note [Foreign calls]): go beyond the limit.
    kRefuse, ///< It does not fit, whatever is paged out.
  };

  virtual ~Room() = default;

  /// Pages out until `nbytes` more fit the limit.
  virtual Answer make_room(Device& device, size_t nbytes) = 0;

  /// After `make_room`: pages out more until there is one free block that is large enough, or
  /// nothing helps.
  virtual void make_contiguous(Device& device, size_t nbytes) = 0;

  /// An allocation of `nbytes` failed though the limit leaves room (fragmentation): pages out at
  /// least as much more. Refuses if nothing was left to page out.
  virtual Answer after_out_of_memory(Device& device, size_t nbytes) = 0;

  /// The allocator itself is at work for an op, and may wait for the device. Not nested.
  virtual void allocation_begins(Device& device) = 0;
  virtual void allocation_ends(Device& device) noexcept = 0;

  /// The allocator is about to grow its pool: gives it the blocks whose page-out is over. Waits
  /// for nothing. The allocator's lock is held.
  virtual void vacate_finished(Device& device) = 0;

  /// A graph's capture is about to begin: waits until nothing is under way.
  virtual void before_capture() = 0;

  /// What holds the memory of a device, and what would do, for an error's text. Waits for nothing.
  virtual std::string explain(Device& device, size_t nbytes) = 0;
};

} // namespace torch_lms
