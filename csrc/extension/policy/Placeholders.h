#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include <c10/core/Allocator.h>

namespace torch_lms {

/// Note [Placeholders]
/// Free memory lies in pieces once storages of many sizes have come and gone. An allocator that has
/// no piece large enough gives memory back to the driver and maps other memory, for which the
/// device waits. What the largest storages of a cycle need is in one piece when the cycle begins:
/// so a plan has it held from then on, or from when there is room on, until the op begins that
/// needs it. Who finds no room takes one of these blocks first; it is held again when there is
/// room.

/// Blocks that nobody writes to, each until the op at some place of the cycle begins.
///
/// Thread-safe: every method may be called from any thread. Blocks are given back to their
/// allocator outside of the mutex.
class Placeholders {
 public:
  /// One more is to be held.
  void want(size_t nbytes, int32_t until);
  /// The size of the next that is to be held and is not; 0 if there is none. One atomic load then.
  size_t missing_bytes();
  /// What is held on a device.
  size_t held_bytes(c10::Device device);
  /// Holds a block for what `missing_bytes` has told.
  void hold(c10::DataPtr block, size_t nbytes);

  /// None is to be held any more that is wanted until `place` or an earlier one.
  void release_until(int32_t place);
  void release() {
    release_until(INT32_MAX);
  }
  /// Gives the last one back, until there is room. Returns whether there was one.
  bool lend_last();

 private:
  struct Wanted {
    size_t nbytes;
    int32_t until;
    c10::DataPtr block; // null: not held
  };

  std::mutex mutex_;
  std::vector<Wanted> wanted_;
  std::atomic<bool> some_missing_{false};
  std::atomic<int32_t> first_until_{INT32_MAX}; // of those that are wanted
};

} // namespace torch_lms
