#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
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
/// which run it on tensors without bytes. What else a kernel allocates shows only when it is
/// refused: then the next op of the kind, with inputs as large, reads all of them from the host.
/// The same goes for what Python code allocates inside of an op (a hook on what is saved, a kernel
/// in Python), however small the op's inputs are beside it.

/// Finds ops that do not fit with their inputs, and takes these out of the way.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. `make_fit`
/// waits for page-outs, at most as long as `Room::make_room`.
class LargeOps {
 public:
  LargeOps(Pager& pager, Policy& policy) : pager_(pager), policy_(policy) {}

  /// Cheap. Whether `make_fit` has anything to look at: inputs of so many bytes in all.
  bool worth_looking(const Device& device, size_t input_bytes) const noexcept {
    return device.limit_bytes() != 0 &&
           (is_large(device, input_bytes) ||
            input_bytes >= least_refused_bytes_.load(std::memory_order_relaxed));
  }

  /// The op is about to use what `frame` has pinned from `first` on, and nothing else yet. Inputs
  /// that go are pinned all the same, and are added to `frame.served`.
  void make_fit(const at::RecordFunction& record, Frame& frame, size_t first);

  /// The op that ran on the calling thread was refused memory; its inputs, as `make_fit` counts
  /// them.
  void note_refused(const at::RecordFunction& record, size_t input_bytes);

 private:
  using Key = size_t; // of an op's name and the bytes of its inputs

  static bool is_large(const Device& device, size_t input_bytes) noexcept {
    return input_bytes > device.limit_bytes() / 8;
  }
  static Key key_of(const at::RecordFunction& record, size_t input_bytes);
  bool has_been_refused(const at::RecordFunction& record, size_t input_bytes);
  size_t made_bytes(const at::RecordFunction& record, size_t input_bytes);
  bool serve_from_host(Frame& frame, const EntityPtr& entity);

  Pager& pager_;
  Policy& policy_;
  std::mutex mutex_; // guards what follows; nothing is called under it
  std::unordered_map<Key, size_t> made_bytes_;
  std::atomic<size_t> least_refused_bytes_{SIZE_MAX}; // of all inputs of an op
};

} // namespace torch_lms
