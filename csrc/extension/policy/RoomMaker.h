#pragma once

#include <string>

#include <extension/base/ThreadContext.h>
#include <extension/memory/Room.h>
#include <extension/policy/LargePieces.h>
#include <extension/policy/Pageouts.h>
#include <extension/policy/PolicyState.h>
#include <extension/policy/Wakefulness.h>

namespace torch_lms {

/// Note [Room in batches]
/// A program runs ahead of the device until memory is full, and then waits for one
/// page-out after another. If it took each block as soon as it came free, blocks of
/// different sizes would soon be interleaved, and large requests find no free block. So
/// who has to wait, waits until a margin is free as well: neighbours in order of use are
/// mostly neighbours in memory, and join. The margin is paged out once, not each time.
///
/// Prefetches come in batches for the same reason, and leave several times the largest
/// recent allocation free in backward: to fill the last free gigabytes costs more, in
/// page-outs that make room for one large block, than the link gains by it.

/// Makes room for the allocators.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. They wait as
/// `Room` says; `wait_for_room` does as `make_room`, without the GIL.
class RoomMaker final : public Room {
 public:
  RoomMaker(PolicyState& state, Wakefulness& wakefulness, Pageouts& pageouts, LargePieces& pieces)
      : state_(state), wakefulness_(wakefulness), pageouts_(pageouts), pieces_(pieces) {}

  // --- Room ---
  Answer make_room(Device& device, size_t nbytes) override;
  void make_contiguous(Device& device, size_t nbytes) override {
    pieces_.make_contiguous(device, nbytes);
  }
  Answer after_out_of_memory(Device& device, size_t nbytes) override;
  void allocation_begins(Device& device) override;
  void allocation_ends(Device& device) noexcept override;
  void vacate_finished(Device& device) override;
  void before_capture() override;
  std::string explain(Device& device, size_t nbytes) override;

  /// The calling thread may vacate memory. With a margin where there may be one.
  Answer wait_for_room(Device& device, size_t nbytes);

  /// Until no more is on its way out. Returns sooner where that does not go on.
  void wait_for_pageouts(Device& device, size_t most_bytes);

 private:
  /// The calling thread's op allocates.
  void note_made(Device& device, size_t nbytes);
  Answer give_way(Device& device, size_t nbytes);
  Answer refuse(Refusal why);
  size_t margin_beside(Device& device, size_t nbytes);

  PolicyState& state_;
  Wakefulness& wakefulness_;
  Pageouts& pageouts_;
  LargePieces& pieces_;
};

} // namespace torch_lms
