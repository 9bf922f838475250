#include <extension/access/UnseenOps.h>

#include <dirent.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>

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

/// By the system's word: running, or about to, or waiting for a disk; also where it says nothing.
/// By stdio, as in HostMemory.cpp.
bool runs(const std::string& thread) {
  std::FILE* const file = std::fopen(("/proc/self/task/" + thread + "/stat").c_str(), "re");
  if (file == nullptr) {
    return errno != ENOENT && errno != ESRCH; // it has just ended
  }
  char text[128]; // the name has at most 16 bytes
  const size_t count = std::fread(text, 1, sizeof(text), file);
  const bool ended = count == 0 && errno == ESRCH;
  std::fclose(file);
  const std::string line(text, count);
  const size_t name_end = line.rfind(')'); // the name may contain anything
  const char state = name_end + 2 < count ? line[name_end + 2] : 'R';
  return !ended && (state == 'R' || state == 'D');
}

bool others_run() {
  const std::string self = std::to_string(syscall(SYS_gettid));
  const std::unique_ptr<DIR, CloseFolder> folder(opendir("/proc/self/task"));
  if (folder == nullptr) {
    return true;
  }
  while (const dirent* entry = readdir(folder.get())) {
    const std::string thread = entry->d_name;
    if (thread[0] != '.' && thread != self && runs(thread)) {
      return true;
    }
  }
  return false;
}

} // namespace

void wait_for_unseen_ops() {
  const auto deadline = Clock::now() + kMost;
  // Twice: while a thread is looked at, one that has been seen asleep may be woken by it.
  while ((others_run() || others_run()) && Clock::now() < deadline) {
    std::this_thread::sleep_for(kBetweenLooks);
  }
}

} // namespace torch_lms
