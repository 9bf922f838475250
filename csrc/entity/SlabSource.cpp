#include <entity/SlabSource.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <entity/Error.h>

namespace torch_lms {
namespace {

constexpr size_t kPageBytes = 4096; // or a part of one, which does as well here
constexpr size_t kHugePageBytes = size_t{2} << 20;

constexpr int kPrivate = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

/// Null on failure, with the reason in errno.
void* map(void* at, size_t nbytes, int flags, int fd) noexcept {
  void* data = mmap(at, nbytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  return data == MAP_FAILED ? nullptr : data;
}

std::string text_of(int error) {
  return std::generic_category().message(error);
}

} // namespace

// --- anonymous memory -----------------------------------------------------------

Slab AnonymousSlabSource::acquire(size_t nbytes) {
  Slab slab;
  slab.data = map(nullptr, nbytes, kPrivate, -1);
  if (slab.data == nullptr) {
    const int error = errno;
    throw HostPoolFull(
        "expected the system to map " + std::to_string(nbytes) +
        " bytes of host memory, found: " + text_of(error) + "; lower host_limit= or free memory");
  }
  slab.nbytes = nbytes;
  return slab;
}

void AnonymousSlabSource::release(Slab& slab) noexcept {
  munmap(slab.data, slab.nbytes);
  slab = Slab();
}

// --- files ------------------------------------------------------------------------

namespace {

/// Reserves a file's blocks. Returns 0 or the error.
int reserve(int fd, size_t nbytes) noexcept {
  struct rlimit most{};
  if (getrlimit(RLIMIT_FSIZE, &most) == 0 && nbytes > most.rlim_cur) {
    return EFBIG; // trying would raise a signal
  }
  int error = EINTR;
  while (error == EINTR) {
    error = posix_fallocate(fd, 0, static_cast<off_t>(nbytes));
  }
  return error;
}

/// What to do about an error of a spill file's.
const char* remedy_of(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "free disk space, or name another directory with spill_dir=";
    case EFBIG:
      return "raise the limit of a file's size (ulimit -f), or name a directory of another file "
             "system with spill_dir=";
    case EMFILE:
      return "raise the limit of open files (ulimit -n), or close some";
    case ENFILE:
      return "raise the system's limit of open files (sysctl fs.file-max), or end what holds many";
    case ENOMEM:
      return "free memory, or raise the limits of addresses (ulimit -v) and of mappings (sysctl "
             "vm.max_map_count)";
    default:
      return "name a directory that exists and can be written to with spill_dir=";
  }
}

[[noreturn]] void throw_spill_failed(const std::string& directory, size_t nbytes, int error) {
  struct statvfs info{};
  const bool known = statvfs(directory.c_str(), &info) == 0;
  throw SpillFailed(
      "expected room for a spill file of " + std::to_string(nbytes) + " bytes in '" + directory +
      "', found: " + text_of(error) +
      (known ? " (" + std::to_string(info.f_bavail * info.f_frsize) + " bytes free)" : "") + "; " +
      remedy_of(error));
}

/// Writes memory to a file from its start. Returns false on an error.
bool write_all(int fd, const char* from, size_t nbytes) noexcept {
  size_t at = 0;
  while (at < nbytes) {
    const ssize_t put = pwrite(fd, from + at, nbytes - at, static_cast<off_t>(at));
    if (put < 0 && errno == EINTR) {
      continue;
    }
    if (put <= 0) {
      return false;
    }
    at += static_cast<size_t>(put);
  }
  return true;
}

/// Copies the slab to `fd`, which takes its place. (Not copy_file_range: what it
/// copies may share its blocks, and the first write would then need room.)
bool move_to_file(Slab& slab, int fd) noexcept {
  if (reserve(fd, slab.nbytes) != 0 ||
      !write_all(fd, static_cast<const char*>(slab.data), slab.nbytes) ||
      map(slab.data, slab.nbytes, MAP_SHARED | MAP_FIXED, fd) == nullptr) {
    return false;
  }
  close(slab.fd);
  slab.fd = fd;
  return true;
}

/// Copies the slab to private memory, which takes its place when it is filled.
bool move_to_memory(Slab& slab) noexcept {
  void* memory = map(nullptr, slab.nbytes, kPrivate, -1);
  if (memory == nullptr) {
    return false;
  }
  std::memcpy(memory, slab.data, slab.nbytes);
  const int flags = MREMAP_MAYMOVE | MREMAP_FIXED;
  if (mremap(memory, slab.nbytes, slab.nbytes, flags, slab.data) == MAP_FAILED) {
    munmap(memory, slab.nbytes);
    return false;
  }
  close(slab.fd);
  slab.fd = -1;
  return true;
}

void forbid_access(Slab& slab) noexcept {
  mprotect(slab.data, slab.nbytes, PROT_NONE); // needs no room, unlike another mapping
  constexpr char kMessage[] =
      "torch_lms: expected room for a forked child's copy of the paged-out storages, found "
      "neither disk space nor memory; the child must not use them. Free disk space, name another "
      "directory with spill_dir=, or page in before forking\n";
  const ssize_t written = write(STDERR_FILENO, kMessage, sizeof(kMessage) - 1);
  static_cast<void>(written);
  close(slab.fd);
  slab.fd = -1;
}

} // namespace

FileSlabSource::FileSlabSource(std::string directory, size_t slab_bytes)
    : directory_(std::move(directory)), slab_bytes_(slab_bytes) {}

/// A new file without a name; -1 on failure, with the reason in errno. Allocates
/// nothing: a forked child calls it.
int FileSlabSource::open_unlinked() const noexcept {
  int fd = open(directory_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  constexpr char kName[] = "/torch_lms_spill_XXXXXX";
  std::array<char, PATH_MAX> path;
  if (fd >= 0 || directory_.size() + sizeof(kName) > path.size()) {
    return fd;
  }
  std::memcpy(path.data(), directory_.data(), directory_.size()); // no O_TMPFILE here
  std::memcpy(path.data() + directory_.size(), kName, sizeof(kName));
  fd = mkostemp(path.data(), O_CLOEXEC);
  if (fd >= 0) {
    unlink(path.data());
  }
  return fd;
}

Slab FileSlabSource::acquire(size_t nbytes) {
  Slab slab;
  slab.fd = open_unlinked();
  int error = slab.fd < 0 ? errno : reserve(slab.fd, nbytes);
  if (error == 0) {
    slab.data = map(nullptr, nbytes, MAP_SHARED, slab.fd);
    error = slab.data == nullptr ? errno : 0;
  }
  if (error == 0) {
    slab.nbytes = nbytes;
    return slab;
  }
  if (slab.fd >= 0) {
    close(slab.fd);
  }
  throw_spill_failed(directory_, nbytes, error);
}

void FileSlabSource::release(Slab& slab) noexcept {
  munmap(slab.data, slab.nbytes);
  if (slab.fd >= 0) {
    close(slab.fd);
  }
  slab = Slab();
}

void FileSlabSource::reclone_after_fork(Slab& slab) noexcept {
  if (slab.fd < 0) {
    return;
  }
  const int fd = open_unlinked();
  if (fd >= 0 && move_to_file(slab, fd)) {
    return;
  }
  if (fd >= 0) {
    close(fd);
  }
  if (!move_to_memory(slab)) {
    forbid_access(slab);
  }
}

// --- pre-faulting -----------------------------------------------------------------

namespace {

void touch_pages(char* data, size_t nbytes) noexcept {
#ifdef MADV_POPULATE_WRITE
  if (madvise(data, nbytes, MADV_POPULATE_WRITE) == 0) {
    return;
  }
#endif
  for (size_t at = 0; at < nbytes; at += kPageBytes) {
    __atomic_fetch_or(data + at, 0, __ATOMIC_RELAXED); // a write that changes nothing
  }
}

} // namespace

void touch_pages_parallel(void* data, size_t nbytes, int threads) noexcept {
  auto* begin = static_cast<char*>(data);
  const size_t count = static_cast<size_t>(std::max(1, threads));
  const size_t share = (nbytes / count / kHugePageBytes + 1) * kHugePageBytes;
  size_t first = 0;
  std::vector<std::thread> helpers;
  try {
    helpers.reserve(count);
    for (; nbytes - first > share; first += share) {
      helpers.emplace_back(&touch_pages, begin + first, share);
    }
  } catch (const std::exception&) { // no more threads: the rest is for this one
  }
  touch_pages(begin + first, nbytes - first);
  for (std::thread& helper : helpers) {
    helper.join();
  }
}

} // namespace torch_lms
