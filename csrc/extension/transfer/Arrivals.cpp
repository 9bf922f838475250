#include <extension/transfer/Arrivals.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace torch_lms {

void Arrivals::add(EntityPtr entity, std::shared_ptr<PageinTransfer> in, FencePtr copy) {
  std::lock_guard<std::mutex> lock(mutex_);
  arrivals_.push_back(Arrival{std::move(entity), std::move(in), std::move(copy)});
  count_.store(arrivals_.size(), std::memory_order_release);
}

EntityPtr Arrivals::cancel_last() {
  for (;;) {
    Arrival last;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto at = std::find_if(
          arrivals_.rbegin(), arrivals_.rend(), [](const Arrival& a) { return a.in != nullptr; });
      if (at == arrivals_.rend()) {
        return nullptr;
      }
      last = std::move(*at);
      arrivals_.erase(std::next(at).base());
      count_.store(arrivals_.size(), std::memory_order_release);
    }
    if (last.entity->cancel_arrival(last.in) != nullptr) {
      return last.entity;
    }
  }
}

std::deque<std::pair<EntityPtr, std::shared_ptr<PageinTransfer>>> Arrivals::take_prefetches() {
  std::deque<std::pair<EntityPtr, std::shared_ptr<PageinTransfer>>> taken;
  std::lock_guard<std::mutex> lock(mutex_);
  for (Arrival& arrival : arrivals_) { // their copies are still looked after
    if (arrival.in != nullptr) {
      taken.emplace_back(arrival.entity, std::exchange(arrival.in, nullptr));
    }
  }
  return taken;
}

void Arrivals::settle() noexcept {
  std::list<Arrival> over; // destroyed after unlocking
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    return;
  }
  // In the order of their copies: who is not over yet has those behind it wait.
  while (!arrivals_.empty() && arrivals_.front().over() &&
         (arrivals_.front().in == nullptr ||
          arrivals_.front().entity->state() != EntityState::kPagingIn)) {
    over.splice(over.end(), arrivals_, arrivals_.begin());
  }
  count_.store(arrivals_.size(), std::memory_order_release);
}

void Arrivals::wait() {
  std::deque<FencePtr> copies;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Arrival& arrival : arrivals_) {
      if (arrival.copy != nullptr) {
        copies.push_back(arrival.copy);
      }
    }
  }
  for (const FencePtr& copy : copies) {
    copy->wait();
  }
  settle();
}

} // namespace torch_lms
