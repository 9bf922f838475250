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

/// Whether the system tells what a thread sleeps in: some sandboxes do not.
bool tells_of_sleep() {
  static const bool tells = [] {
    int error = 0;
    read_of(own_name(), "syscall", &error);
    return error == 0;
  }();
  return tells;
}

/// Of a thread that sleeps: whether it does in one of the locks of Python's own.
bool wants_lock(const std::string& thread) {
  const auto is_own = interpreter().owns_address;
  if (is_own == nullptr || !tells_of_sleep()) {
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
    : self_(own_name()),
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
      seen().threads.insert(own_name());
    }
  } catch (const std::bad_alloc&) { // for a few bytes: it is waited for a little longer
  }
}

bool UnseenOps::is_past(const std::string& thread) {
  if (past_.count(thread) != 0) {
    return true;
  }
  bool is = false;
  {
    const std::lock_guard<std::mutex> lock(seen().mutex);
    is = seen().threads.count(thread) != 0;
  }
  if (is || (places_ != nullptr && places_->has_moved(std::strtoul(thread.c_str(), nullptr, 10)))) {
    past_.insert(thread);
    return true;
  }
  return false;
}

void UnseenOps::look_at(const std::string& thread, Others* others) {
  int error = 0;
  const std::string stat = read_of(thread, "stat", &error);
  if (has_ended(error) || is_past(thread)) {
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
  const std::unique_ptr<DIR, CloseFolder> folder(opendir("/proc/self/task"));
  others.run = folder == nullptr;
  while (const dirent* entry = folder != nullptr ? readdir(folder.get()) : nullptr) {
    if (entry->d_name[0] != '.' && entry->d_name != self_) {
      look_at(entry->d_name, &others);
    }
  }
  return others;
}

void UnseenOps::wait() {
  const auto deadline = Clock::now() + kMost;
  // Twice: while a thread is looked at, one that has been seen asleep may be woken by it.
  for (int quiet = 0; quiet < 2 && Clock::now() < deadline;) {
    const Others others = look();
    quiet = others.run || others.want_lock ? 0 : quiet + 1;
    if (others.want_lock) {
      const WithoutGil they_go_on;
      std::this_thread::sleep_for(kBetweenLooks);
    } else if (others.run) {
      std::this_thread::sleep_for(kBetweenLooks);
    }
  }
}

} // namespace torch_lms
