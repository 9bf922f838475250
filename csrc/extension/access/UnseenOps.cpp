#include <extension/access/UnseenOps.h>

#include <dirent.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <set>
#include <thread>

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torch_lms {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kMost = std::chrono::seconds(1);
constexpr auto kBetweenLooks = std::chrono::milliseconds(1);

struct CloseFolder {
  void operator()(DIR* folder) const noexcept {
    closedir(folder);
  }
};

/// The threads that have begun an observed op since somebody waits.
struct Seen {
  std::mutex mutex;
  std::set<std::string> threads;
};

Seen& seen() {
  static auto* all = new Seen(); // never destroyed: threads may outlive static destruction
  return *all;
}

std::string own_name() {
  return std::to_string(syscall(SYS_gettid));
}

/// What the system says of a thread; `*error` is 0 if it could be read. By stdio, as in
/// HostMemory.cpp.
std::string read_of(const std::string& thread, const char* name, int* error) {
  std::FILE* const file = std::fopen(("/proc/self/task/" + thread + "/" + name).c_str(), "re");
  if (file == nullptr) {
    *error = errno;
    return "";
  }
  char text[128]; // the name in `stat` has at most 16 bytes
  errno = 0;
  const size_t count = std::fread(text, 1, sizeof(text), file);
  *error = count != 0 ? 0 : errno;
  std::fclose(file);
  return std::string(text, count);
}

bool has_ended(int error) {
  return error == ENOENT || error == ESRCH;
}

/// Running, or about to, or waiting for a disk.
bool runs(const std::string& stat) {
  const size_t name_end = stat.rfind(')'); // the name may contain anything
  const char state = name_end + 2 < stat.size() ? stat[name_end + 2] : 'R';
  return state == 'R' || state == 'D';
}

/// Of a thread that sleeps: whether it does in one of the locks of Python's own. Where the system
/// does not tell it might.
bool wants_lock(const std::string& thread) {
  const auto is_own = interpreter().owns_address;
  if (is_own == nullptr) {
    return false;
  }
  int error = 0;
  const std::string line = read_of(thread, "syscall", &error);
  char* rest = nullptr;
  const long number = std::strtol(line.c_str(), &rest, 10);
  if (error != 0 || rest == line.c_str()) { // or it has woken up
    return true;
  }
  return number == SYS_futex && is_own(std::strtoull(rest, nullptr, 16));
}

} // namespace

std::atomic<bool> UnseenOps::waited_for_{false};

UnseenOps::UnseenOps()
    : places_(interpreter().note_places != nullptr ? interpreter().note_places() : nullptr) {
  const std::string self = own_name();
  const std::unique_ptr<DIR, CloseFolder> folder(opendir("/proc/self/task"));
  readable_ = folder != nullptr;
  while (const dirent* entry = readable_ ? readdir(folder.get()) : nullptr) {
    if (entry->d_name[0] != '.' && entry->d_name != self) {
      threads_.emplace_back(entry->d_name);
    }
  }
  waited_for_.store(true, std::memory_order_relaxed);
}

UnseenOps::~UnseenOps() {
  waited_for_.store(false, std::memory_order_relaxed);
  const std::lock_guard<std::mutex> lock(seen().mutex);
  seen().threads.clear();
}

/// What an op calls inside of itself has autograd's keys excluded. (So has all that the program
/// calls in inference mode: there it is not noted.)
void UnseenOps::note_thread() noexcept {
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality)) {
    return;
  }
  try {
    const std::lock_guard<std::mutex> lock(seen().mutex);
    seen().threads.insert(own_name());
  } catch (const std::bad_alloc&) { // for a few bytes: it is waited for a little longer
  }
}

bool UnseenOps::is_past(const std::string& thread) const {
  {
    const std::lock_guard<std::mutex> lock(seen().mutex);
    if (seen().threads.count(thread) != 0) {
      return true;
    }
  }
  return places_ != nullptr && places_->has_moved(std::strtoul(thread.c_str(), nullptr, 10));
}

UnseenOps::Others UnseenOps::look() {
  Others others = readable_ ? Others::kSleep : Others::kRun;
  const auto is_out = [&](const std::string& thread) {
    int error = 0;
    const std::string stat = read_of(thread, "stat", &error);
    if (has_ended(error) || is_past(thread)) {
      return true;
    }
    if (error != 0 || runs(stat)) {
      others = Others::kRun;
    } else if (others == Others::kSleep && wants_lock(thread)) {
      others = Others::kWantLock;
    }
    return false;
  };
  threads_.erase(std::remove_if(threads_.begin(), threads_.end(), is_out), threads_.end());
  return others;
}

void UnseenOps::wait() {
  const auto deadline = Clock::now() + kMost;
  // Twice: while a thread is looked at, one that has been seen asleep may be woken by it.
  for (int quiet = 0; quiet < 2 && Clock::now() < deadline;) {
    const Others others = look();
    quiet = others == Others::kSleep ? quiet + 1 : 0;
    if (others == Others::kRun) {
      std::this_thread::sleep_for(kBetweenLooks);
    } else if (others == Others::kWantLock) {
      const WithoutGil they_go_on;
      std::this_thread::sleep_for(kBetweenLooks);
    }
  }
}

} // namespace torch_lms
