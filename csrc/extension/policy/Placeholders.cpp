#include <extension/policy/Placeholders.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace torch_lms {

void Placeholders::want(size_t nbytes, int32_t until) {
  std::lock_guard<std::mutex> lock(mutex_);
  wanted_.push_back({nbytes, until, c10::DataPtr()});
  first_until_.store(
      std::min(first_until_.load(std::memory_order_relaxed), until), std::memory_order_release);
  some_missing_.store(true, std::memory_order_release);
}

size_t Placeholders::missing_bytes() {
  if (!some_missing_.load(std::memory_order_acquire)) {
    return 0;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  const auto first = std::find_if(
      wanted_.begin(), wanted_.end(), [](const Wanted& one) { return one.block == nullptr; });
  some_missing_.store(first != wanted_.end(), std::memory_order_release);
  return first != wanted_.end() ? first->nbytes : 0;
}

size_t Placeholders::held_bytes(c10::Device device) {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t nbytes = 0;
  for (const Wanted& one : wanted_) {
    nbytes += one.block != nullptr && one.block.device() == device ? one.nbytes : 0;
  }
  return nbytes;
}

void Placeholders::hold(c10::DataPtr block, size_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto first = std::find_if(wanted_.begin(), wanted_.end(), [&](const Wanted& one) {
    return one.block == nullptr && one.nbytes == nbytes;
  });
  if (first != wanted_.end()) {
    std::swap(first->block, block);
  } // else it is not wanted any more, and goes once unlocked
}

void Placeholders::release_until(int32_t place) {
  if (place < first_until_.load(std::memory_order_acquire)) {
    return; // as at most ops
  }
  std::vector<Wanted> released; // destroyed after unlocking
  std::lock_guard<std::mutex> lock(mutex_);
  const auto stays = [&](const Wanted& one) { return one.until > place; };
  const auto first = std::stable_partition(wanted_.begin(), wanted_.end(), stays);
  std::move(first, wanted_.end(), std::back_inserter(released));
  wanted_.erase(first, wanted_.end());
  int32_t first_until = INT32_MAX;
  for (const Wanted& one : wanted_) {
    first_until = std::min(first_until, one.until);
  }
  first_until_.store(first_until, std::memory_order_release);
}

bool Placeholders::lend_last() {
  c10::DataPtr lent; // destroyed after unlocking
  std::lock_guard<std::mutex> lock(mutex_);
  const auto last = std::find_if(
      wanted_.rbegin(), wanted_.rend(), [](const Wanted& one) { return one.block != nullptr; });
  if (last == wanted_.rend()) {
    return false;
  }
  std::swap(last->block, lent);
  some_missing_.store(true, std::memory_order_release);
  return true;
}

} // namespace torch_lms
