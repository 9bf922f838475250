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
/// bit. A kind that fails makes no recipes.

/// The kinds of op that have been auditioned.
///
/// Thread-safe: every method may be called from any thread. `try_out` runs the op and waits for it.
class Audition {
 public:
  /// Runs the op again if none of its kind has been, and compares with what it has `made`. Empty if
  /// its kind makes the same again, else why it does not count as one that does.
  std::string try_out(const OpRecipe& recipe, const std::vector<at::Tensor>& made);

 private:
  std::mutex mutex_; // guards what follows; nothing is called under it
  std::unordered_map<uint64_t, std::string> verdicts_;
};

} // namespace torch_lms
