#pragma once

#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <ATen/record_function.h>

#include <extension/access/Frame.h>
#include <extension/policy/Policy.h>

namespace torch_lms {

/// Note [Ops larger than the limit]
/// An op pins its inputs and then allocates its outputs, so it needs room for both at once, or so
/// it seems: a kernel can read its inputs from their host copies, slowly. Where both together
/// exceed what the limit leaves, the largest inputs go out before the op, and are served from there
/// (`EntityStorageImpl::serve`). How much an op makes is asked of PyTorch's own shape functions,
/// which run it on tensors without bytes; many kernels need as much again for themselves. Once an
/// op of the kind has run with inputs as large, the most that it has held at once is known. One
/// that is refused all the same reads all of its inputs from the host the next time, until there is
/// a higher limit. That is for inputs of more than an eighth of the limit. Where Python code inside
/// of an op with smaller ones (a hook on what is saved, a kernel in Python) is refused memory, the
/// limit gives way each time: an op that was refused once, before there was a plan, would read from
/// the host in each step.

/// Finds ops that do not fit with their inputs, and takes these out of the way.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. `make_fit`
/// waits for page-outs, at most as long as `Room::make_room`.
class LargeOps {
 public:
  LargeOps(Pager& pager, Policy& policy) : pager_(pager), policy_(policy) {}

  /// Cheap. Whether `make_fit` has anything to look at: inputs of so many bytes in all.
  static bool worth_looking(const Device& device, size_t input_bytes) noexcept {
    return device.limit_bytes() != 0 && input_bytes > device.limit_bytes() / 8;
  }

  /// The op is about to use what `frame` has pinned from `first` on, and nothing else yet. Inputs
  /// that go are pinned all the same, and are added to `frame.served`. Returns whether inputs were
  /// let go of for a moment: other threads may have asked for the page-outs of those that stay.
  bool make_fit(const at::RecordFunction& record, Frame& frame, size_t first);

  /// The op that has run on the calling thread has held so much at once, besides its inputs.
  void note_made(const at::RecordFunction& record, size_t input_bytes, size_t made_bytes);
  /// The op that ran on the calling thread was refused memory under such a limit.
  void note_refused(const at::RecordFunction& record, size_t input_bytes, size_t limit_bytes);

 private:
  using Key = size_t; // of an op's name and the bytes of its inputs
  struct Need {
    size_t nbytes = 0; // besides the inputs
    bool known = false; // else a guess
    size_t refused_limit_bytes = 0; // under which it was refused, if it was
  };

  static Key key_of(const at::RecordFunction& record, size_t input_bytes);
  size_t needed_bytes(const at::RecordFunction& record, size_t input_bytes, size_t limit_bytes);
  bool send_out(const Frame& frame, const EntityPtr& entity);
  bool serve_from_host(Frame& frame, const EntityPtr& entity);

  Pager& pager_;
  Policy& policy_;
  std::mutex mutex_; // guards what follows; nothing is called under it
  std::unordered_map<Key, Need> needs_;
};

} // namespace torch_lms
