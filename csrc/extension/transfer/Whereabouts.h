#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include <extension/base/Stats.h>
#include <extension/transfer/Arrivals.h>
#include <extension/transfer/Entity.h>
#include <extension/transfer/KeptCopies.h>

namespace torch_lms {

/// Who wants to know where entities are. Called from the threads that move them, with no lock
/// held; must not block.
class PagerListener {
 public:
  virtual ~PagerListener() = default;
  virtual void became_resident(const EntityPtr& entity) = 0;
  virtual void was_paged_out(const EntityPtr& entity) = 0;
  virtual void was_cancelled(const EntityPtr& entity) = 0;
};

/// Where entities are: counts them, and tells who wants to know.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL, with no lock
/// held, `left_host` with any. They block on nothing but mutexes, but for `came` without memory for
/// an arrival: it waits for the copy.
class Whereabouts {
 public:
  Whereabouts(Stats& stats, Arrivals& arrivals, KeptCopies& kept)
      : stats_(stats), arrivals_(arrivals), kept_(kept) {}

  /// Set up before anything moves.
  void set_listener(PagerListener* listener) noexcept {
    listener_ = listener;
  }

  /// An entity has been made: it is resident.
  void was_made(const EntityPtr& entity) {
    listener_->became_resident(entity);
  }
  /// Its prefetch did not begin, or has been called off.
  void stays_out(const EntityPtr& entity) {
    listener_->was_paged_out(entity);
  }
  void left_device(const EntityPtr& entity);
  /// Its host copy is not its bytes any more.
  void left_host(const EntityStorageImpl& entity) noexcept;
  /// It has been asked for, and was found, or came, so.
  void came(const EntityPtr& entity, AccessResult how);

  /// Of device blocks that no storage has yet.
  std::atomic<int64_t>& arriving_bytes() noexcept {
    return arriving_bytes_;
  }
  int64_t paged_out_bytes() const noexcept {
    return paged_out_bytes_.load(std::memory_order_relaxed);
  }
  /// The same without what has device memory already, into which it is copied.
  size_t off_device_bytes() const noexcept {
    const int64_t arriving_bytes = arriving_bytes_.load(std::memory_order_relaxed);
    return static_cast<size_t>(std::max<int64_t>(0, paged_out_bytes() - arriving_bytes));
  }
  int64_t paged_out_storages() const noexcept {
    return paged_out_storages_.load(std::memory_order_relaxed);
  }

 private:
  void note_arrival(const EntityPtr& entity);

  Stats& stats_;
  Arrivals& arrivals_;
  KeptCopies& kept_;
  PagerListener* listener_ = nullptr;
  std::atomic<int64_t> paged_out_bytes_{0};
  std::atomic<int64_t> arriving_bytes_{0};
  std::atomic<int64_t> paged_out_storages_{0};
};

} // namespace torch_lms
