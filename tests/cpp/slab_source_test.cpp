#include <entity/SlabSource.h>

#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <entity/Error.h>

#include "baton.h"
#include "harness.h"
#include "temporary_directory.h"

namespace {

bool without_tmpfile = false;
bool without_populate = false;
int reserving_fails_with = 0;

} // namespace

/// In place of the C library's: may be a file system that refuses.
extern "C" int posix_fallocate(int fd, off_t from, off_t nbytes) {
  if (reserving_fails_with != 0) {
    return reserving_fails_with;
  }
  return syscall(SYS_fallocate, fd, 0, from, nbytes) == 0 ? 0 : errno;
}

/// In place of the C library's: may be a file system that has no O_TMPFILE.
extern "C" int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const bool makes = (flags & (O_CREAT | O_TMPFILE)) != 0;
  const unsigned mode = makes ? va_arg(rest, unsigned) : 0;
  va_end(rest);
  if (without_tmpfile && (flags & O_TMPFILE) == O_TMPFILE) {
    errno = EOPNOTSUPP;
    return -1;
  }
  return static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}

/// In place of the C library's: may be that of a kernel before 5.14.
extern "C" int madvise(void* data, size_t nbytes, int advice) noexcept {
#ifdef MADV_POPULATE_WRITE
  if (without_populate && advice == MADV_POPULATE_WRITE) {
    errno = EINVAL;
    return -1;
  }
#endif
  return static_cast<int>(syscall(SYS_madvise, data, nbytes, advice));
}

namespace torch_lms {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kSlab = kMiB;

size_t entries_of(const std::string& directory) {
  size_t count = 0;
  DIR* listing = opendir(directory.c_str());
  while (listing != nullptr && readdir(listing) != nullptr) {
    ++count;
  }
  closedir(listing);
  return count - 2; // . and ..
}

size_t open_files() {
  return entries_of("/proc/self/fd");
}

char* bytes(const Slab& slab) {
  return static_cast<char*>(slab.data);
}

void fill(const Slab& slab, char value) {
  std::memset(slab.data, value, slab.nbytes);
}

bool filled(const Slab& slab, char value) {
  return std::all_of(
      bytes(slab), bytes(slab) + slab.nbytes, [value](char byte) { return byte == value; });
}

/// A file system of its own with 1 MiB of room, in a process of its own.
void mount_tiny(const std::string& at) {
  if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      mount("tiny", at.c_str(), "tmpfs", 0, "size=1m") != 0) {
    throw harness::Skipped("needs root");
  }
}

bool can_mount() {
  TemporaryDirectory directory;
  return harness::passes_in_child([&] { mount_tiny(directory.path()); });
}

void limit_file_size(size_t nbytes) {
  const struct rlimit limit{nbytes, RLIM_INFINITY};
  setrlimit(RLIMIT_FSIZE, &limit);
}

// --- anonymous memory -----------------------------------------------------------------

TEST(anonymous_slabs_are_page_aligned_zero_and_writable) {
  AnonymousSlabSource source(kSlab);
  CHECK_EQ(source.slab_bytes(), kSlab);
  Slab slab = source.acquire(kSlab);
  CHECK_EQ(reinterpret_cast<uintptr_t>(slab.data) % kPage, 0);
  CHECK_EQ(slab.nbytes, kSlab);
  CHECK_EQ(slab.fd, -1);
  CHECK(filled(slab, 0));
  fill(slab, 1);
  source.release(slab);
  CHECK(slab.data == nullptr);
}

TEST(what_the_system_does_not_map_is_an_error) {
  AnonymousSlabSource source(kSlab);
  CHECK_THROWS(source.acquire(size_t{1} << 62), HostPoolFull, "host_limit=");
}

// --- files ----------------------------------------------------------------------------

TEST(file_slabs_leave_no_name_and_no_descriptor) {
  for (bool without : {false, true}) {
    without_tmpfile = without;
    TemporaryDirectory directory;
    FileSlabSource source(directory.path(), kSlab);
    const size_t before = open_files();
    Slab slab = source.acquire(kSlab);
    CHECK_EQ(entries_of(directory.path()), 0);
    CHECK(slab.fd >= 0);
    CHECK_EQ(fcntl(slab.fd, F_GETFD), FD_CLOEXEC);
    fill(slab, 'x');
    CHECK(filled(slab, 'x'));
    source.release(slab);
    CHECK(slab.data == nullptr && slab.fd == -1);
    CHECK_EQ(open_files(), before);
  }
  without_tmpfile = false;
}

TEST(blocks_on_disk_are_reserved_at_once) {
  TemporaryDirectory directory;
  FileSlabSource source(directory.path(), kSlab);
  Slab slab = source.acquire(kSlab);
  struct stat info{};
  REQUIRE(fstat(slab.fd, &info) == 0);
  CHECK_EQ(info.st_size, kSlab);
  CHECK(static_cast<size_t>(info.st_blocks) * 512 >= kSlab);
  source.release(slab);
}

TEST(a_missing_directory_is_named) {
  TemporaryDirectory directory;
  const std::string missing = directory.path() + "/missing";
  FileSlabSource source(missing, kSlab);
  CHECK_THROWS(source.acquire(kSlab), SpillFailed, "'" + missing + "'");
  CHECK_THROWS(source.acquire(kSlab), SpillFailed, "exists");
  CHECK_THROWS(source.acquire(kSlab), SpillFailed, "spill_dir=");
}

TEST(files_beyond_the_size_limit_are_an_error_not_a_signal) {
  TemporaryDirectory directory;
  CHECK(harness::passes_in_child([&] {
    limit_file_size(kMiB);
    FileSlabSource source(directory.path(), kSlab);
    const size_t before = open_files();
    CHECK_THROWS(source.acquire(kMiB + 1), SpillFailed, std::to_string(kMiB + 1) + " bytes in");
    CHECK_THROWS(source.acquire(kMiB + 1), SpillFailed, "ulimit -f");
    CHECK_EQ(open_files(), before);
    Slab slab = source.acquire(kMiB);
    fill(slab, 1);
  }));
  FileSlabSource source(directory.path(), kSlab);
  CHECK_THROWS(source.acquire(SIZE_MAX), SpillFailed, std::to_string(SIZE_MAX));
}

TEST(a_full_disk_is_an_error_when_a_slab_is_acquired) {
  if (!can_mount()) {
    SKIP("needs root");
  }
  TemporaryDirectory directory;
  CHECK(harness::passes_in_child([&] {
    mount_tiny(directory.path());
    FileSlabSource source(directory.path(), kSlab);
    CHECK_THROWS(source.acquire(8 * kMiB), SpillFailed, std::to_string(8 * kMiB) + " bytes in");
    CHECK_THROWS(source.acquire(8 * kMiB), SpillFailed, "'" + directory.path() + "'");
    CHECK_THROWS(source.acquire(8 * kMiB), SpillFailed, std::to_string(kMiB) + " bytes free");
    CHECK_THROWS(source.acquire(8 * kMiB), SpillFailed, "spill_dir=");
    Slab all = source.acquire(kMiB); // a failure has left nothing behind
    CHECK_THROWS(source.acquire(kPage), SpillFailed, "(0 bytes free)");
    fill(all, 1);
    CHECK(filled(all, 1));
    source.release(all);
    all = source.acquire(kMiB);
  }));
}

TEST(too_many_open_files_are_no_fault_of_the_directory) {
  TemporaryDirectory directory;
  FileSlabSource source(directory.path(), kSlab);
  struct rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const struct rlimit none{3, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  CHECK_THROWS(source.acquire(kSlab), SpillFailed, "bytes free); raise the limit of open files");
  CHECK_THROWS(source.acquire(kSlab), SpillFailed, "(ulimit -n)");
  setrlimit(RLIMIT_NOFILE, &before);
  Slab slab = source.acquire(kSlab);
  source.release(slab);
}

TEST(each_error_says_what_helps) {
  TemporaryDirectory directory;
  FileSlabSource source(directory.path(), kSlab);
  const std::vector<std::pair<int, const char*>> remedies = {
      {ENOSPC, "; free disk space, or name another directory with spill_dir="},
      {EDQUOT, "; free disk space, or name another directory with spill_dir="},
      {EFBIG, "(ulimit -f), or name a directory of another file system with spill_dir="},
      {ENFILE, "(sysctl fs.file-max)"},
      {ENOMEM, "; free memory"},
      {EACCES, "; name a directory that exists and can be written to with spill_dir="},
      {EROFS, "; name a directory that exists and can be written to with spill_dir="},
      {EOPNOTSUPP, "; name a directory that exists and can be written to with spill_dir="},
  };
  const size_t before = open_files();
  for (const auto& remedy : remedies) {
    reserving_fails_with = remedy.first;
    CHECK_THROWS(source.acquire(kSlab), SpillFailed, remedy.second);
  }
  reserving_fails_with = 0;
  CHECK_EQ(open_files(), before);
}

TEST(a_file_that_finds_no_addresses_is_no_fault_of_the_directory) {
  TemporaryDirectory directory;
  FileSlabSource source(directory.path(), kSlab);
  struct rlimit before{};
  getrlimit(RLIMIT_AS, &before);
  const struct rlimit none{kPage, before.rlim_max};
  setrlimit(RLIMIT_AS, &none);
  std::string said;
  try {
    source.acquire(kSlab);
  } catch (const SpillFailed& failed) {
    said = failed.what();
  }
  setrlimit(RLIMIT_AS, &before);
  CHECK(said.find("; free memory") != std::string::npos);
}

// --- forks ----------------------------------------------------------------------------

/// Forks with a slab full of 'p'; then both sides write at once, and look.
void check_that_a_fork_parts(FileSlabSource& source, const std::function<void()>& prepare_child) {
  Slab slab = source.acquire(kSlab);
  fill(slab, 'p');
  Baton cloned, parent_wrote, child_wrote, parent_looked;
  const pid_t child = harness::start_child([&] {
    prepare_child();
    const void* at = slab.data;
    source.reclone_after_fork(slab);
    cloned.pass();
    parent_wrote.await();
    CHECK_EQ(static_cast<const void*>(slab.data), at);
    CHECK(filled(slab, 'p'));
    fill(slab, 'c');
    child_wrote.pass();
    parent_looked.await();
    CHECK(filled(slab, 'c'));
    source.release(slab);
  });
  cloned.await();
  fill(slab, 'q');
  parent_wrote.pass();
  child_wrote.await();
  CHECK(filled(slab, 'q'));
  fill(slab, 'r');
  parent_looked.pass();
  CHECK(harness::child_passed(child));
  CHECK(filled(slab, 'r'));
  source.release(slab);
}

TEST(parent_and_child_never_see_each_others_writes) {
  TemporaryDirectory directory;
  FileSlabSource source(directory.path(), kSlab);
  check_that_a_fork_parts(source, [] {});
  CHECK_EQ(entries_of(directory.path()), 0);
}

TEST(a_child_without_unnamed_files_has_its_own_too) {
  TemporaryDirectory directory;
  FileSlabSource source(directory.path(), kSlab);
  check_that_a_fork_parts(source, [] { without_tmpfile = true; });
  CHECK_EQ(entries_of(directory.path()), 0);
}

TEST(a_child_without_disk_space_has_memory) {
  TemporaryDirectory directory;
  FileSlabSource source(directory.path(), kSlab);
  check_that_a_fork_parts(source, [] { limit_file_size(kPage); });
}

TEST(a_child_whose_directory_is_gone_has_memory) {
  TemporaryDirectory directory;
  const std::string path = directory.path() + "/gone";
  mkdir(path.c_str(), 0700);
  FileSlabSource source(path, kSlab);
  check_that_a_fork_parts(source, [&] { rmdir(path.c_str()); });
}

TEST(a_childs_copy_is_a_file_where_it_can_be) {
  TemporaryDirectory directory;
  FileSlabSource source(directory.path(), kSlab);
  Slab slab = source.acquire(kSlab);
  fill(slab, 'p');
  CHECK(harness::passes_in_child([&] {
    const size_t before = open_files();
    source.reclone_after_fork(slab);
    CHECK(slab.fd >= 0);
    CHECK_EQ(open_files(), before);
    struct stat info{};
    CHECK(fstat(slab.fd, &info) == 0 && static_cast<size_t>(info.st_blocks) * 512 >= kSlab);
    CHECK(filled(slab, 'p'));
  }));
  CHECK(harness::passes_in_child([&] {
    const size_t before = open_files();
    limit_file_size(kPage);
    source.reclone_after_fork(slab);
    CHECK_EQ(slab.fd, -1);
    CHECK_EQ(open_files(), before - 1);
    CHECK(filled(slab, 'p'));
  }));
  source.release(slab);
}

TEST(a_child_may_fork_again) {
  for (size_t file_limit : {size_t{RLIM_INFINITY}, kPage}) {
    TemporaryDirectory directory;
    FileSlabSource source(directory.path(), kSlab);
    Slab slab = source.acquire(kSlab);
    fill(slab, 'p');
    CHECK(harness::passes_in_child([&] {
      limit_file_size(file_limit);
      source.reclone_after_fork(slab);
      fill(slab, 'c');
      CHECK(harness::passes_in_child([&] {
        source.reclone_after_fork(slab);
        CHECK(filled(slab, 'c'));
        fill(slab, 'g');
      }));
      CHECK(filled(slab, 'c'));
    }));
    CHECK(filled(slab, 'p'));
    source.release(slab);
  }
}

/// With room for neither a file nor memory. The limits hold for this call alone.
void reclone_without_room(FileSlabSource& source, Slab& slab) {
  struct rlimit before{};
  getrlimit(RLIMIT_AS, &before);
  limit_file_size(kPage);
  const struct rlimit none{kPage, before.rlim_max};
  setrlimit(RLIMIT_AS, &none);
  source.reclone_after_fork(slab);
  setrlimit(RLIMIT_AS, &before);
  limit_file_size(RLIM_INFINITY);
}

TEST(a_child_without_any_room_is_told_and_reads_nothing_wrong) {
  TemporaryDirectory directory;
  FileSlabSource source(directory.path(), kSlab);
  Slab slab = source.acquire(kSlab);
  const std::string said = directory.path() + "/said";
  CHECK(harness::passes_in_child([&] {
    const int log = open(said.c_str(), O_CREAT | O_RDWR, 0600);
    const int standard_error = dup(STDERR_FILENO);
    dup2(log, STDERR_FILENO);
    reclone_without_room(source, slab);
    dup2(standard_error, STDERR_FILENO);
    Baton pipe;
    CHECK(!pipe.write_from(slab.data));
    CHECK(!pipe.write_from(bytes(slab) + slab.nbytes - 1));
    char text[512] = {};
    CHECK(pread(log, text, sizeof(text) - 1, 0) > 0);
    CHECK(std::string(text).find("spill_dir=") != std::string::npos);
  }));
  source.release(slab);
}

// --- pre-faulting ---------------------------------------------------------------------

bool resident(const Slab& slab) {
  std::vector<unsigned char> pages(slab.nbytes / kPage);
  REQUIRE(mincore(slab.data, slab.nbytes, pages.data()) == 0);
  return std::all_of(
      pages.begin(), pages.end(), [](unsigned char page) { return (page & 1) != 0; });
}

void check_touching(size_t nbytes, int threads) {
  AnonymousSlabSource source(kSlab);
  Slab slab = source.acquire(nbytes);
  CHECK(!resident(slab));
  touch_pages_parallel(slab.data, slab.nbytes, threads);
  CHECK(resident(slab));
  CHECK(filled(slab, 0));
  fill(slab, 'x');
  touch_pages_parallel(slab.data, slab.nbytes, threads);
  CHECK(filled(slab, 'x'));
  source.release(slab);
}

TEST(touched_pages_are_all_there_and_as_they_were) {
  for (bool without : {false, true}) {
    without_populate = without;
    for (int threads : {-1, 0, 1, 3, 16}) {
      for (size_t nbytes : {kPage, 2 * kMiB, 2 * kMiB + kPage, 9 * kMiB}) {
        check_touching(nbytes, threads);
      }
    }
    touch_pages_parallel(nullptr, 0, 4);
  }
  without_populate = false;
}

TEST(touching_does_without_helpers) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  SKIP("the sanitizer itself needs the memory for a thread");
#endif
  CHECK(harness::passes_in_child([] {
    AnonymousSlabSource source(kSlab);
    Slab slab = source.acquire(8 * kMiB);
    struct rlimit before{};
    getrlimit(RLIMIT_AS, &before);
    const struct rlimit none{kPage, before.rlim_max};
    setrlimit(RLIMIT_AS, &none); // no thread gets a stack
    touch_pages_parallel(slab.data, slab.nbytes, 4);
    setrlimit(RLIMIT_AS, &before);
    CHECK(resident(slab));
  }));
}

} // namespace
} // namespace torch_lms
