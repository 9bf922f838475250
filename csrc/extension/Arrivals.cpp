#include <extension/Arrivals.h>

#include <utility>

#include <extension/OpObserver.h>

namespace torch_lms {

Arrivals::Scope::Scope(Arrivals& arrivals, EntityStorageImpl& entity)
    : arrivals_(arrivals), entity_(entity) {
  arrivals_.count_.fetch_add(1);
}

Arrivals::Scope::~Scope() {
  // In automatic mode every op looks storages of this size up anyway.
  FencePtr copy = tracks_storages_of(entity_.nbytes()) ? nullptr : entity_.arrival();
  if (copy != nullptr) {
    std::lock_guard<std::mutex> lock(arrivals_.mutex_);
    arrivals_.copies_.push_back(std::move(copy)); // counted already
  } else {
    arrivals_.count_.fetch_sub(1);
  }
}

void Arrivals::settle() noexcept {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  while (lock.owns_lock() && !copies_.empty() && copies_.front()->done()) {
    copies_.pop_front();
    count_.fetch_sub(1);
  }
}

void Arrivals::wait() {
  std::deque<FencePtr> copies;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    copies = copies_;
  }
  for (const FencePtr& copy : copies) {
    copy->wait();
  }
  settle();
}

} // namespace torch_lms
