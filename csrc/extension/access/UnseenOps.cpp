#include <extension/access/UnseenOps.h>

#include <dirent.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <string>
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
  bool open = false; // somebody waits
  std::set<uint64_t> threads;
};

Seen& seen() {
  static auto* all = new Seen(); // never destroyed: threads may outlive static destruction
  return *all;
}

uint64_t own_number() {
  return static_cast<uint64_t>(syscall(SYS_gettid));
}

/// What the system says of a thread; `*error` is 0 if it could be read. By stdio, as in
/// HostMemory.cpp.
std::string read_of(uint64_t thread, const char* name, int* error) {
  const std::string path = "/proc/self/task/" + std::to_string(thread) + "/" + name;
  std::FILE* const file = std::fopen(path.c_str(), "re");
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

} // namespace

std::atomic<bool> UnseenOps::waited_for_{false};

UnseenOps::UnseenOps()
    : self_(own_number()),
      places_(interpreter().note_places != nullptr ? interpreter().note_places() : nullptr) {
  const std::lock_guard<std::mutex> lock(seen().mutex);
  seen().open = true;
  waited_for_.store(true, std::memory_order_relaxed);
}

UnseenOps::~UnseenOps() {
  const std::lock_guard<std::mutex> lock(seen().mutex);
  waited_for_.store(false, std::memory_order_relaxed);
  seen().open = false; // who is about to note something is too late
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
    if (seen().open) {
      seen().threads.insert(own_number());
    }
  } catch (const std::bad_alloc&) { // for a few bytes: it is waited for a little longer
  }
}

void UnseenOps::note_past() {
  if (places_ != nullptr) {
    places_->add_moved(past_);
  }
  const std::lock_guard<std::mutex> lock(seen().mutex);
  past_.insert(seen().threads.begin(), seen().threads.end());
}

/// Of a thread that sleeps: whether it does in one of the locks of Python's own, or may.
bool UnseenOps::wants_lock(uint64_t thread) const {
  if (interpreter().hold == nullptr) {
    return false; // there is no Python
  }
  int error = 0;
  const std::string line = read_of(thread, "syscall", &error);
  if (error == 0) {
    char* rest = nullptr;
    const long number = std::strtol(line.c_str(), &rest, 10);
    if (rest == line.c_str()) {
      return true; // it has woken up
    }
    if (number != SYS_futex) {
      return false;
    }
    if (const auto is_own = interpreter().owns_address) {
      return is_own(std::strtoull(rest, nullptr, 16));
    }
  }
  return places_ == nullptr || places_->knows(thread);
}

void UnseenOps::look_at(uint64_t thread, Others* others) {
  int error = 0;
  const std::string stat = read_of(thread, "stat", &error);
  if (has_ended(error)) {
    return;
  }
  if (error != 0 || runs(stat)) {
    others->run = true;
  } else if (wants_lock(thread)) {
    others->want_lock = true;
  }
}

/// Also those that are there since the wait has begun: an op may have started them.
UnseenOps::Others UnseenOps::look() {
  Others others;
  note_past();
  const std::unique_ptr<DIR, CloseFolder> folder(opendir("/proc/self/task"));
  others.run = folder == nullptr;
  while (const dirent* entry = folder != nullptr ? readdir(folder.get()) : nullptr) {
    const uint64_t thread = std::strtoul(entry->d_name, nullptr, 10); // 0: the folder, or above it
    if (thread != 0 && thread != self_ && past_.count(thread) == 0) {
      look_at(thread, &others);
    }
  }
  return others;
}

bool UnseenOps::wait() {
  const auto deadline = Clock::now() + kMost;
  int quiet = 0;
  // Twice: while a thread is looked at, one that has been seen asleep may be woken by it.
  while (quiet < 2 && Clock::now() < deadline) {
    const Others others = look();
    quiet = others.run || others.want_lock ? 0 : quiet + 1;
    if (others.want_lock) {
      const WithoutGil they_go_on;
      std::this_thread::sleep_for(kBetweenLooks);
    } else if (others.run) {
      std::this_thread::sleep_for(kBetweenLooks);
    }
  }
  return quiet == 2;
}

} // namespace torch_lms
