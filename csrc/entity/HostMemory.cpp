#include <entity/HostMemory.h>

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <sstream>

namespace torch_lms {
namespace {

/// The number in a file; SIZE_MAX if there is none ("max", no file).
size_t read_bytes(const std::string& path) {
  std::ifstream file(path);
  size_t nbytes = 0;
  return file >> nbytes && nbytes != 0 ? nbytes : SIZE_MAX; // some systems write 0 for none
}

/// The process's group in the hierarchy of `controller` ("" is version 2).
std::string group_of(const std::string& root, const std::string& controller) {
  std::ifstream file(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) {
      continue;
    }
    const std::string names = "," + line.substr(first + 1, second - first - 1) + ",";
    if (names == "," + controller + "," ||
        (!controller.empty() && names.find("," + controller + ",") != std::string::npos)) {
      return line.substr(second + 1);
    }
  }
  return std::string();
}

/// The least limit from a group up to the root of its hierarchy.
size_t least_limit(const std::string& mount, std::string group, const std::string& file) {
  size_t least = SIZE_MAX;
  for (;;) {
    least = std::min(least, read_bytes(mount + group + "/" + file));
    const size_t slash = group.find_last_of('/');
    if (slash == std::string::npos) {
      return least;
    }
    group.resize(slash);
  }
}

} // namespace

size_t physical_bytes() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) *
      static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
}

size_t available_bytes(const std::string& root) {
  std::ifstream file(root + "/proc/meminfo");
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    size_t kib = 0;
    if (words >> name >> kib && name == "MemAvailable:") {
      return kib * 1024;
    }
  }
  return physical_bytes();
}

size_t cgroup_limit_bytes(const std::string& root) {
  const size_t second = least_limit(root + "/sys/fs/cgroup", group_of(root, ""), "memory.max");
  const size_t first = least_limit(
      root + "/sys/fs/cgroup/memory", group_of(root, "memory"), "memory.limit_in_bytes");
  return std::min(first, second);
}

size_t default_host_limit_bytes(const std::string& root) {
  return std::min(physical_bytes(), cgroup_limit_bytes(root)) / 10 * 8;
}

} // namespace torch_lms
