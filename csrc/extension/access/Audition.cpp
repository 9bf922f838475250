#include <extension/access/Audition.h>

#include <algorithm>
#include <utility>

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <extension/access/BelowAutograd.h>
#include <extension/base/ErrorText.h>
#include <extension/base/ThreadContext.h>

namespace torch_lms {
namespace {

/// The same bytes as whole numbers: a NaN is equal to itself then, and 0 is not -0.
at::Tensor bits_of(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  switch (plain.element_size()) {
    case 1:
      return plain.view(at::kByte);
    case 2:
      return plain.view(at::kShort);
    case 4:
      return plain.view(at::kInt);
    default:
      return plain.view(at::kLong);
  }
}

/// Piece by piece: PyTorch's comparison makes a byte for each element.
bool are_equal(const at::Tensor& one, const at::Tensor& other) {
  constexpr int64_t kPiece = int64_t{1} << 25;
  if (one.numel() <= kPiece || !one.is_contiguous() || !other.is_contiguous()) {
    return at::equal(one, other);
  }
  const at::Tensor all = one.view(-1);
  const at::Tensor others = other.view(-1);
  for (int64_t from = 0; from < all.numel(); from += kPiece) {
    const int64_t count = std::min(kPiece, all.numel() - from);
    if (!at::equal(all.narrow(0, from, count), others.narrow(0, from, count))) {
      return false;
    }
  }
  return true;
}

std::string compare(
    const std::vector<at::Tensor>& made,
    const std::vector<at::Tensor>& again,
    bool first_only) {
  if (again.size() != (first_only ? 1 : made.size())) {
    return "it made another number of tensors";
  }
  for (size_t i = 0; i < again.size(); ++i) {
    if (made[i].defined() != again[i].defined()) {
      return "it made another number of tensors";
    }
    if (!made[i].defined()) {
      continue;
    }
    const bool alike = made[i].dtype() == again[i].dtype() &&
                       made[i].strides() == again[i].strides() &&
                       made[i].sizes() == again[i].sizes();
    if (!alike || !are_equal(bits_of(made[i]), bits_of(again[i]))) {
      return "it made other bits when it was run again";
    }
  }
  return "";
}

} // namespace

c10::optional<std::string> Audition::verdict_on(uint64_t kind) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = verdicts_.find(kind);
  return at == verdicts_.end() ? c10::nullopt : c10::make_optional(at->second);
}

c10::Storage Audition::copy_overwritten(const OpRecipe& recipe) {
  if (recipe.overwrites() == nullptr || verdict_on(recipe.kind()).has_value()) {
    return c10::Storage();
  }
  try {
    const BelowAutograd ours;
    const Auditioning audition;
    return recipe.overwritten_bytes().clone().storage();
  } catch (const c10::OutOfMemoryError&) {
    return c10::Storage();
  }
}

std::string Audition::try_out(
    const OpRecipe& recipe,
    const std::vector<at::Tensor>& made,
    const c10::Storage& before) {
  const uint64_t kind = recipe.kind();
  if (const auto known = verdict_on(kind)) {
    return *known;
  }
  constexpr const char* kNoRoom = "there was no room to try whether it makes the same again";
  if (recipe.overwrites() != nullptr && !before) {
    return kNoRoom;
  }
  std::string verdict;
  bool remember = true;
  try {
    const BelowAutograd ours;
    const Auditioning audition;
    verdict = compare(made, recipe.run_op(before), recipe.makes_first_only());
  } catch (const c10::OutOfMemoryError&) {
    verdict = kNoRoom;
    remember = false;
  } catch (const std::exception& error) {
    verdict = "it failed when it was run again: " + text_of(error);
  }
  if (remember) {
    std::lock_guard<std::mutex> lock(mutex_);
    verdicts_[kind] = verdict;
  }
  return verdict;
}

} // namespace torch_lms
