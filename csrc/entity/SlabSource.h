#pragma once

#include <cstddef>
#include <string>

namespace torch_lms {

/// A large piece of host memory that a pool divides.
struct Slab {
  void* data = nullptr;
  size_t nbytes = 0;
  int fd = -1; ///< The file behind it; -1 for anonymous memory.
};

/// Where a pool's slabs come from. Thread-safe: every method may be called from
/// any thread.
class SlabSource {
 public:
  virtual ~SlabSource() = default;

  /// A slab of at least `nbytes`. Throws HostPoolFull, SpillFailed or
  /// TransferFailed; nothing is left behind then.
  virtual Slab acquire(size_t nbytes) = 0;

  virtual void release(Slab& slab) noexcept = 0;

  /// What the slabs are, for messages.
  virtual const char* name() const noexcept = 0;

  /// The preferred size of a slab.
  virtual size_t slab_bytes() const noexcept = 0;

  /// In a forked child: makes the slab this process's own, at the same address,
  /// with the bytes that it has now. Only calls what is safe after a fork.
  virtual void reclone_after_fork(Slab& slab) noexcept {
    static_cast<void>(slab);
  }
};

/// Slabs of private anonymous memory.
class AnonymousSlabSource final : public SlabSource {
 public:
  explicit AnonymousSlabSource(size_t slab_bytes) : slab_bytes_(slab_bytes) {}

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
/// writes them out when it needs the memory. The disk blocks are reserved when a
/// slab is acquired, so a full disk is an error there and never a signal later.
class FileSlabSource final : public SlabSource {
 public:
  FileSlabSource(std::string directory, size_t slab_bytes);

  Slab acquire(size_t nbytes) override;
  void release(Slab& slab) noexcept override;
  const char* name() const noexcept override {
    return "spill files";
  }
  size_t slab_bytes() const noexcept override {
    return slab_bytes_;
  }
  void reclone_after_fork(Slab& slab) noexcept override;

 private:
  int open_file() const;

  const std::string directory_;
  const size_t slab_bytes_;
};

/// Pre-faults memory with several threads: one alone takes seconds for gigabytes.
void touch_pages_parallel(void* data, size_t nbytes, int threads);

} // namespace torch_lms
