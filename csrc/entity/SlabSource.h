#pragma once

#include <cstddef>
#include <string>

namespace torch_lms {

/// A large piece of host memory that a pool divides.
struct Slab {
  void* data = nullptr; ///< Page-aligned.
  size_t nbytes = 0;
  int fd = -1; ///< The file behind it; -1 for anonymous memory.
};

/// Where a pool's slabs come from.
///
/// Thread-safe: every method may be called from any thread, except
/// `reclone_after_fork`. Acquiring and releasing are slow (they fault, register
/// or reserve gigabytes): do not call them with a lock that others wait for.
class SlabSource {
 public:
  SlabSource() = default;
  virtual ~SlabSource() = default;
  SlabSource(const SlabSource&) = delete;
  SlabSource& operator=(const SlabSource&) = delete;

  /// A slab of at least `nbytes` (not 0). Throws HostPoolFull, SpillFailed or
  /// TransferFailed; nothing is left behind then. Thread-safe.
  virtual Slab acquire(size_t nbytes) = 0;

  /// `slab` comes from `acquire`; it is empty afterwards. Thread-safe.
  virtual void release(Slab& slab) noexcept = 0;

  /// What the slabs are, for messages. Thread-safe.
  virtual const char* name() const noexcept = 0;

  /// The preferred size of a slab. Thread-safe.
  virtual size_t slab_bytes() const noexcept = 0;

  /// In a forked child: makes the slab this process's own, at the same address,
  /// with the bytes that it has now. Private memory is that already. Only for the
  /// child's one thread; calls nothing that a fork from a threaded process forbids.
  virtual void reclone_after_fork(Slab& slab) noexcept {
    static_cast<void>(slab);
  }
};

/// Slabs of private anonymous memory, not touched yet. Thread-safe.
class AnonymousSlabSource final : public SlabSource {
 public:
  explicit AnonymousSlabSource(size_t slab_bytes) : slab_bytes_(slab_bytes) {}

  /// Throws HostPoolFull if the system maps no more. Thread-safe.
  Slab acquire(size_t nbytes) override;
  void release(Slab& slab) noexcept override;
  const char* name() const noexcept override {
    return "host memory";
  }
  size_t slab_bytes() const noexcept override {
    return slab_bytes_;
  }

 private:
  const size_t slab_bytes_;
};

/// Slabs that are files without a name in a directory, mapped shared: the system
/// writes them out when it needs the memory, and they vanish with the process. The
/// disk blocks are reserved when a slab is acquired, so a full disk is an error
/// there and never a signal later. Thread-safe.
class FileSlabSource final : public SlabSource {
 public:
  /// `directory` is used, and must exist, from the first `acquire` on.
  FileSlabSource(std::string directory, size_t slab_bytes);

  /// Throws SpillFailed, which names the directory, the need and the free space.
  /// Thread-safe.
  Slab acquire(size_t nbytes) override;
  void release(Slab& slab) noexcept override;
  const char* name() const noexcept override {
    return "spill files";
  }
  size_t slab_bytes() const noexcept override {
    return slab_bytes_;
  }

  /// A file of the child's own, else anonymous memory. With room for neither, the
  /// slab can no longer be accessed, which a message on standard error explains:
  /// a child that goes on to `exec` is not harmed, and none reads wrong bytes.
  void reclone_after_fork(Slab& slab) noexcept override;

 private:
  int open_unlinked() const noexcept;

  const std::string directory_;
  const size_t slab_bytes_;
};

/// Faults private memory in with several threads, the calling one among them: one
/// alone takes seconds for gigabytes. Bytes stay as they are. Does with fewer
/// threads where the system gives no more. Thread-safe.
void touch_pages_parallel(void* data, size_t nbytes, int threads) noexcept;

} // namespace torch_lms
