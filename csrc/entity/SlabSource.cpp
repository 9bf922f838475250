#include <entity/SlabSource.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include <entity/Error.h>

namespace torch_lms {
namespace {

constexpr size_t kPageBytes = 4096;

void* map(size_t nbytes, int flags, int fd) noexcept {
  void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  return data == MAP_FAILED ? nullptr : data;
}

/// Copies a file from its start to memory. Returns false on an error.
bool read_all(int fd, char* to, size_t nbytes) noexcept {
  size_t at = 0;
  while (at < nbytes) {
    const ssize_t got = pread(fd, to + at, nbytes - at, static_cast<off_t>(at));
    if (got <= 0) {
      return false;
    }
    at += static_cast<size_t>(got);
  }
  return true;
}

} // namespace

// --- anonymous memory -----------------------------------------------------------

Slab AnonymousSlabSource::acquire(size_t nbytes) {
  Slab slab;
  slab.data = map(nbytes, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
  if (slab.data == nullptr) {
    throw HostPoolFull(
        "expected the system to map " + std::to_string(nbytes) + " bytes of host memory, found: " +
        std::strerror(errno) + "; lower host_limit= or free memory");
  }
  slab.nbytes = nbytes;
  return slab;
}

void AnonymousSlabSource::release(Slab& slab) noexcept {
  munmap(slab.data, slab.nbytes);
  slab = Slab();
}

// --- files ------------------------------------------------------------------------

FileSlabSource::FileSlabSource(std::string directory, size_t slab_bytes)
    : directory_(std::move(directory)), slab_bytes_(slab_bytes) {}

int FileSlabSource::open_file() const {
  int fd = open(directory_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd >= 0) {
    return fd;
  }
  std::string path = directory_ + "/torch_lms_spill_XXXXXX"; // no O_TMPFILE here
  fd = mkostemp(&path[0], O_CLOEXEC);
  if (fd >= 0) {
    unlink(path.c_str());
  }
  return fd;
}

Slab FileSlabSource::acquire(size_t nbytes) {
  Slab slab;
  slab.fd = open_file();
  int error = slab.fd < 0 ? errno : posix_fallocate(slab.fd, 0, static_cast<off_t>(nbytes));
  if (error == 0) {
    slab.data = map(nbytes, MAP_SHARED, slab.fd);
    error = slab.data == nullptr ? errno : 0;
  }
  if (error == 0) {
    slab.nbytes = nbytes;
    return slab;
  }
  if (slab.fd >= 0) {
    close(slab.fd);
  }
  struct statvfs info {};
  const bool known = statvfs(directory_.c_str(), &info) == 0;
  throw SpillFailed(
      "expected room for a spill file of " + std::to_string(nbytes) + " bytes in '" + directory_ +
      "', found: " + std::strerror(error) +
      (known ? " (" + std::to_string(info.f_bavail * info.f_frsize) + " bytes free)" : "") +
      "; free disk space, or name another directory with spill_dir=");
}

void FileSlabSource::release(Slab& slab) noexcept {
  munmap(slab.data, slab.nbytes);
  close(slab.fd);
  slab = Slab();
}

void FileSlabSource::reclone_after_fork(Slab& slab) noexcept {
  const int fixed = MAP_FIXED;
  const int copy = open(directory_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (copy >= 0 && ftruncate(copy, static_cast<off_t>(slab.nbytes)) == 0) {
    loff_t from = 0;
    loff_t to = 0;
    size_t left = slab.nbytes;
    while (left > 0) {
      const ssize_t done = copy_file_range(slab.fd, &from, copy, &to, left, 0);
      if (done <= 0) {
        break;
      }
      left -= static_cast<size_t>(done);
    }
    if (left == 0 &&
        mmap(slab.data, slab.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | fixed, copy, 0) !=
            MAP_FAILED) {
      close(slab.fd);
      slab.fd = copy;
      return;
    }
  }
  if (copy >= 0) {
    close(copy);
  }
  // No file: anonymous memory. It must be filled before it takes the slab's place.
  void* memory = map(slab.nbytes, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
  const bool filled =
      memory != nullptr && read_all(slab.fd, static_cast<char*>(memory), slab.nbytes);
  if (!filled ||
      mremap(memory, slab.nbytes, slab.nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, slab.data) ==
          MAP_FAILED) {
    constexpr char kMessage[] =
        "torch_lms: expected room for a forked child's copy of the paged-out storages, found "
        "neither disk space nor memory; free disk space or page in before forking\n";
    const ssize_t written = write(STDERR_FILENO, kMessage, sizeof(kMessage) - 1);
    static_cast<void>(written);
    _exit(1);
  }
}

// --- pre-faulting -----------------------------------------------------------------

void touch_pages_parallel(void* data, size_t nbytes, int threads) {
  auto* begin = static_cast<volatile char*>(data);
  const size_t count = static_cast<size_t>(std::max(1, threads));
  const size_t share = (nbytes / count + kPageBytes) / kPageBytes * kPageBytes;
  std::vector<std::thread> workers;
  for (size_t first = 0; first < nbytes; first += share) {
    const size_t last = std::min(nbytes, first + share);
    workers.emplace_back([begin, first, last] {
      for (size_t at = first; at < last; at += kPageBytes) {
        begin[at] = 0;
      }
    });
  }
  for (std::thread& worker : workers) {
    worker.join();
  }
}

} // namespace torch_lms
