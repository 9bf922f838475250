#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>

#include <c10/macros/Macros.h>

namespace c10 {
namespace impl {

/// Note [Threads at a fork]
/// A forked child has the thread that forked, no other, and every lock as it was. So a fork waits
/// until nobody is in the middle of paging: threads of the program hold a `Passage` there, workers
/// a step (`CudaEntityTransferQueue::prepare_fork`), which a thread within may be waiting for. So
/// threads first, then workers, then the locks that all storages share.
///
/// Thread-safe.
class C10_API ForkGate {
 public:
  static ForkGate& get();

  /// Held while the calling thread pages. Waits while another thread forks. One within
  /// another does nothing, and none is needed on a worker.
  class C10_API Passage {
   public:
    Passage();
    ~Passage();
    Passage(const Passage&) = delete;
    Passage& operator=(const Passage&) = delete;

   private:
    const bool outermost_;
  };

  /// Before a fork, on the thread that forks: waits until no other thread is within, and
  /// lets none in.
  void close();

  /// After it, in the parent and in the child.
  void open() noexcept;

 private:
  ForkGate() = default;

  // A child cannot use a condition variable that its parent's threads wait for, so newcomers wait
  // for a lock.
  std::mutex entrance_; // taken first
  std::mutex mutex_;
  std::condition_variable left_;
  size_t within_ = 0; // threads
};

} // namespace impl
} // namespace c10
