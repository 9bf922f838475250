#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include <extension/access/NumericState.h>
#include <extension/access/Storages.h>

namespace torch_lms {

/// Note [Recipes]
/// A storage can be dropped where an op made it that can be run again from what it was given, with
/// the same result. What is kept of the op's inputs are their storages, sizes and dtypes: tensors
/// would keep autograd's graph alive. Such an op
///   - is PyTorch's, has a schema, and its record has all of its arguments;
///   - writes to nothing, its outputs are memory of their own, and they are set by its inputs: no
///     random numbers (attention without dropout is fine), no state, no `empty`;
///     `native_dropout` also makes the mask that it has drawn, and its output is made again from
///     that: the mask has no recipe; batch norm that trains is run again without its running
///     statistics, which it has updated;
///   - ran with no dispatch mode on, and while no op was run again with other switches on another
///     thread: what these do to it nobody knows;
///   - takes and makes plain tensors: dense, strided, no wrappers, in PyTorch's own memory. What
///     others have the address of (numpy, another process, a file) they may write to unseen.
/// Its inputs stay as they were: whoever is about to write to one, or to what it made, says so
/// first (`Recipes::before_write`), and what has been dropped then comes back before the write.
///
/// An op that writes to one of its arguments in place, and to nothing else, makes a longer recipe
/// of the one by which that storage was made (the earlier one): make it so, then run the op on what
/// has been made. The earlier recipe ends with the write, since what it made is gone, but its
/// inputs are those of the longer one, too. The storage itself is an input of neither.
///
/// The op is run again below autograd and autocast, on the stream of its first time, with nobody
/// recording it, and with the switches of PyTorch as they were (`NumericState`).

/// One op that has been run, and can be run again.
///
/// Thread-safe: every method may be called from any thread. `run` runs an op; nothing else blocks.
class OpRecipe {
 public:
  /// Ops in a recipe. Each is run inside of the next one's `run`.
  static constexpr size_t kMostSteps = 16;

  /// From an op that begins; null if it cannot be run again. The record's inputs are valid then
  /// only.
  static std::shared_ptr<OpRecipe> capture(const at::RecordFunction& record);

  /// The op has ended and made `made`. False if it cannot be run again after all. To be called
  /// before anything below, and before another thread knows of it.
  bool finish(const std::vector<at::Tensor>& made);

  /// The storage that the op writes to in place, to be compared only; null for an op that makes
  /// its outputs. Such a recipe can be run once it has an earlier one.
  const c10::StorageImpl* overwrites() const noexcept {
    return overwrites_;
  }

  /// What the op writes to, byte by byte; only while it runs.
  at::Tensor overwritten_bytes() const;

  /// `run` makes what the op writes to as the `output`-th tensor of `earlier`. False if that cannot
  /// be. To be called before another thread knows of it.
  bool follow(const std::shared_ptr<const OpRecipe>& earlier, size_t output);

  /// From now on it keeps none of its inputs alive, and cannot be run or followed: `held` can. To
  /// be called last of all that tells it something, and before another thread knows of it.
  void loosen();
  bool loose() const noexcept {
    return loose_;
  }

  /// The same recipe, by its id too, which keeps its inputs alive; null where one of them is gone.
  /// One that is not loose is the same object.
  static std::shared_ptr<const OpRecipe> held(const std::shared_ptr<const OpRecipe>& recipe);

  /// Whether `run` makes no more than the first of what the op made.
  bool makes_first_only() const noexcept {
    return drawn_;
  }

  /// All tensors that the op makes, in order, those in lists too; undefined ones as they are.
  /// Throws what the op throws. Its inputs are on the device, and pinned; `stream` is the current
  /// one.
  std::vector<at::Tensor> run() const;

  /// The same for the op alone, which writes to `overwritten` if it writes in place.
  std::vector<at::Tensor> run_op(const c10::Storage& overwritten) const;

  /// On which the op, and those before it, are run; none where all is on the processor.
  const c10::optional<c10::Stream>& stream() const noexcept {
    return stream_;
  }

  /// Never another recipe's, as its address may be one day.
  uint64_t id() const noexcept {
    return id_;
  }

  /// Of its tensors, in the order of the op's arguments, and of those of the earlier one; some may
  /// be there twice, or null.
  const std::vector<c10::Storage>& inputs() const noexcept {
    return storages_;
  }

  /// Of ops that differ in their tensors' bytes alone, whatever came earlier.
  uint64_t kind() const;

  /// The bytes that it reads or has made have been written since: it cannot be run any more.
  void invalidate() noexcept {
    valid_.store(false, std::memory_order_release);
  }
  bool valid() const noexcept {
    return valid_.load(std::memory_order_acquire);
  }

 private:
  /// What of an input is no reference to the tensor itself. The storage is `storages_`'s.
  struct Meta {
    c10::DispatchKeySet keys;
    c10::Device device{c10::kCPU};
    caffe2::TypeMeta dtype;
    c10::SmallVector<int64_t, 5> sizes;
    c10::SmallVector<int64_t, 5> strides;
    int64_t offset = 0;
    bool wrapped_number = false;
  };
  explicit OpRecipe(const c10::OperatorHandle& op);
  OpRecipe(const OpRecipe& loose, std::vector<c10::Storage> inputs);
  bool take(const c10::IValue& value);
  bool take_tensor(const at::Tensor& tensor);
  bool take_overwritten(const at::Tensor& tensor);
  void take_stream();
  at::Tensor tensor(size_t index, const c10::Storage& overwritten) const;
  c10::IValue value(const c10::IValue& taken, const c10::Storage& overwritten, size_t* next) const;

  const uint64_t id_;
  c10::OperatorHandle op_;
  std::vector<c10::IValue> arguments_; // with undefined tensors for those of `storages_`
  std::vector<c10::Storage> storages_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> known_storages_; // instead, if it is loose
  bool loose_ = false;
  std::vector<Meta> metas_;
  std::vector<bool> defined_;
  const c10::StorageImpl* overwrites_ = nullptr;
  size_t overwritten_ = 0; // by number of its tensor, if there is one
  std::shared_ptr<const OpRecipe> earlier_;
  size_t earlier_output_ = 0;
  size_t steps_ = 1;
  c10::optional<c10::Stream> stream_;
  NumericState state_;
  bool drawn_ = false; // from random numbers, which are in an input since `finish`
  std::atomic<bool> valid_{true};
};

/// Every tensor behind values, in order, those in lists and tuples too; undefined ones count.
std::vector<at::Tensor> tensors_in(Values values);

} // namespace torch_lms
