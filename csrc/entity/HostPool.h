#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include <entity/SlabSource.h>

namespace torch_lms {

struct HostPoolOptions {
  size_t limit_bytes = SIZE_MAX; ///< Of all slabs together.
  size_t alignment = 4096; ///< Of every block, in size and address; a power of two up to 4096.
};

struct HostPoolStats {
  size_t slab_bytes = 0; ///< What the limit applies to; slabs being acquired included.
  size_t used_bytes = 0; ///< In blocks, rounded to the alignment.
  size_t limit_bytes = 0;
  size_t slabs = 0;
};

/// Divides slabs of host memory into blocks of exactly the size that is asked for
/// (rounded to the alignment), best fit, joining free neighbours.
///
/// Thread-safe: every method may be called from any thread, except the last two of
/// the three around a fork. Slabs are acquired and released by one thread at a time
/// and outside of the mutex: blocks that fit are had, and freed, meanwhile. A thread
/// whose block does not fit waits for the slab on its way before it asks for another.
class HostPool {
 public:
  /// Throws Error if the options are not valid.
  HostPool(std::unique_ptr<SlabSource> source, HostPoolOptions options);

  /// Gives every slab back; blocks in use end with it.
  ~HostPool();
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  /// A block, of one alignment unit for 0 bytes. Where no free block fits, the pool
  /// grows by a slab of the preferred size, of less where the limit or the system has
  /// less, or of the request in steps of 2 MiB where that is more. Slabs without a
  /// used block make way first. Throws HostPoolFull when the limit is reached, and
  /// what the source throws; every block is as it was then. Thread-safe.
  void* allocate(size_t nbytes);

  /// `data` comes from `allocate`, or is null. Never waits for a slab. Thread-safe.
  void free(void* data) noexcept;

  /// Who holds blocks that it can do without: before the pool grows it is asked for spare ones,
  /// before an allocation fails for any. It frees some and returns true, or has none. Called
  /// without a lock, from any thread that allocates.
  enum class Urgency { kSpare, kNeeded };
  using Reclaim = std::function<bool(Urgency)>;

  /// Thread-safe.
  void set_reclaim(Reclaim reclaim);

  /// Gives slabs without a used block back to the source. Thread-safe.
  void trim() noexcept;

  /// From a lower limit on, slabs without a used block go back to the source until
  /// the rest are within it; slabs in use stay, and give no block beyond it. Thread-safe.
  void set_limit(size_t limit_bytes) noexcept;

  /// Slabs come from another source from now on. False, and nothing is changed, while a
  /// block is in use. Thread-safe.
  bool replace_source(std::unique_ptr<SlabSource> source);

  /// Thread-safe.
  HostPoolStats stats() const noexcept;

  /// Around a fork, for `pthread_atfork`, on the thread that forks: before it, after it
  /// in the parent, after it in the child. Once each: the first takes the pool's locks,
  /// the others give them back. Between the first two, nothing is allocated or freed and
  /// the parent waits for the child to copy what they would otherwise share, so that the
  /// child has the bytes of the moment of the fork. (`reclone_after_fork` alone makes a
  /// copy too, of blocks that the parent may be reusing by then.)
  void prepare_fork() noexcept;
  void after_fork_in_parent() noexcept;
  void reclone_after_fork() noexcept;

 private:
  using Address = char*;

  /// A slab is divided into blocks without gaps; two free ones are never neighbours.
  struct Block {
    size_t nbytes;
    bool used;
    bool begins_slab;
  };
  using Blocks = std::map<Address, Block>;

  size_t round_up(size_t nbytes) const noexcept;

  // Of slabs. Those that take the lock give it up while the source works.
  using Lock = std::unique_lock<std::mutex>;
  void* grow(size_t nbytes);
  void* make_room(Lock& lock, size_t nbytes, size_t wanted_bytes);
  bool fits_locked(size_t slab_bytes) const noexcept;
  size_t reserve_locked(size_t nbytes, size_t wanted_bytes);
  void bring_slab(Lock& lock, size_t nbytes, size_t reserved_bytes);
  Slab acquire_up_to(size_t most_bytes, size_t nbytes);
  void add_slab_locked(const Slab& slab);
  bool release_free_slab(Lock& lock) noexcept;
  [[noreturn]] void throw_full_locked(size_t nbytes) const;

  // Of blocks.
  void* take_reclaimed(size_t nbytes, Urgency urgency);
  void* take_locked(size_t nbytes);
  Blocks::iterator find_fit_locked(size_t nbytes) noexcept;
  void index_locked(Blocks::iterator block) noexcept;
  void unindex_locked(Blocks::iterator block) noexcept;
  static bool can_join_locked(Blocks::iterator left, Blocks::iterator right) noexcept;
  void join_locked(Blocks::iterator left, Blocks::iterator right) noexcept;

  const size_t alignment_;

  std::mutex resize_mutex_; ///< Held while slabs come and go; taken before `mutex_`.
  mutable std::mutex mutex_; ///< Guards all below.
  std::unique_ptr<SlabSource> source_; ///< Replaced under both mutexes.
  Reclaim reclaim_;
  size_t limit_bytes_;
  size_t slab_bytes_ = 0;
  size_t used_bytes_ = 0;
  std::map<Address, Slab> slabs_;
  Blocks blocks_;
  std::set<std::pair<size_t, Address>> free_by_size_;
  bool index_complete_ = true; ///< False if memory for an index entry was missing.

  bool forking_ = false;
  std::array<int, 2> fork_pipe_{{-1, -1}};
};

} // namespace torch_lms
