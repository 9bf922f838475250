#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <extension/access/OpRecipe.h>

namespace torch_lms {

/// Note [Auditions]
/// What an op's schema says is not enough to trust it: a kernel may add up in an order that varies,
/// or choose its algorithm anew. So each kind of op (its name, its tensors' sizes and dtypes, its
/// numbers) is run again once, while the cycle is recorded, and what it makes is compared bit for
/// bit. A kind that fails makes no recipes. What an op overwrites is copied before, and the op is
/// run again on the copy. Where that has no room the kind is auditioned another time: the limit
/// gives way for none.

/// The kinds of op that have been auditioned.
///
/// Thread-safe: every method may be called from any thread. `try_out` runs the op and waits for it.
class Audition {
 public:
  /// What an op overwrites, to be called before it begins. Null if its kind has been auditioned, or
  /// where there is no room.
  c10::Storage copy_overwritten(const OpRecipe& recipe);

  /// Runs the op again if none of its kind has been, and compares with what it has `made`. Empty if
  /// its kind makes the same again, else why it does not count as one that does. `before`: what
  /// `copy_overwritten` has returned.
  std::string try_out(
      const OpRecipe& recipe,
      const std::vector<at::Tensor>& made,
      const c10::Storage& before);

 private:
  c10::optional<std::string> verdict_on(uint64_t kind);

  std::mutex mutex_; // guards what follows; nothing is called under it
  std::unordered_map<uint64_t, std::string> verdicts_;
};

} // namespace torch_lms
