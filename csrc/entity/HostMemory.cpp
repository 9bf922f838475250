#include <entity/HostMemory.h>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

namespace torch_lms {
namespace {

constexpr size_t kNoLimitFromBytes = size_t{1} << 62; // version 1 writes a huge number for none

/// The memory files of one version of control groups, and the group's place there.
struct Hierarchy {
  std::string mount;
  std::string group; // "/a/b"; "" or "/" is the root
  const char* limit_file;
  const char* current_file;
};

struct GroupMemory {
  size_t limit_bytes = SIZE_MAX;
  size_t current_bytes = 0; // of the group with that limit
};

/// The lines of a file; none if it cannot be read.
///
/// By stdio: a process may hold several copies of the C++ library (some packages bring one
/// linked in), and numbers were seen to be read as 0 through streams in one that did.
std::vector<std::string> read_lines(const std::string& path) {
  std::vector<std::string> lines;
  std::FILE* file = std::fopen(path.c_str(), "re");
  if (file == nullptr) {
    return lines;
  }
  bool continues = false;
  char part[256];
  while (std::fgets(part, sizeof(part), file) != nullptr) {
    std::string text(part);
    const bool ends = !text.empty() && text.back() == '\n';
    if (ends) {
      text.pop_back();
    }
    if (continues) {
      lines.back() += text;
    } else {
      lines.push_back(std::move(text));
    }
    continues = !ends;
  }
  std::fclose(file);
  return lines;
}

/// The number that a text begins with, after spaces; `otherwise` if there is none.
size_t parse_number(const std::string& text, size_t otherwise) {
  const size_t first = text.find_first_not_of(" \t");
  if (first == std::string::npos || text[first] < '0' || text[first] > '9') {
    return otherwise;
  }
  errno = 0;
  const unsigned long long number = std::strtoull(text.c_str() + first, nullptr, 10);
  return errno == 0 ? static_cast<size_t>(number) : otherwise;
}

/// The number in a file; `otherwise` if there is none ("max", no file).
size_t read_bytes(const std::string& path, size_t otherwise) {
  const std::vector<std::string> lines = read_lines(path);
  return lines.empty() ? otherwise : parse_number(lines.front(), otherwise);
}

/// SIZE_MAX for none, which some systems write as 0.
size_t read_limit_bytes(const std::string& path) {
  const size_t nbytes = read_bytes(path, SIZE_MAX);
  return nbytes == 0 || nbytes >= kNoLimitFromBytes ? SIZE_MAX : nbytes;
}

/// The process's group in the hierarchy of `controller` ("" is version 2).
std::string group_of(const std::string& root, const std::string& controller) {
  // number:controllers:group
  for (const std::string& line : read_lines(root + "/proc/self/cgroup")) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) {
      continue;
    }
    const std::string names = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool found = controller.empty() ? names == ",,"
                                          : names.find("," + controller + ",") != std::string::npos;
    if (found) {
      return line.substr(second + 1);
    }
  }
  return std::string();
}

/// From the process's group up to the root of the hierarchy. A group that cannot be
/// seen from inside of a container is passed over: its mount is the container's own.
GroupMemory read_groups(const Hierarchy& hierarchy) {
  GroupMemory least;
  bool found = false;
  for (std::string group = hierarchy.group;; group.resize(group.find_last_of('/'))) {
    const std::string directory = hierarchy.mount + group + "/";
    const size_t limit = read_limit_bytes(directory + hierarchy.limit_file);
    const size_t current = read_bytes(directory + hierarchy.current_file, SIZE_MAX);
    if (limit < least.limit_bytes || (!found && current != SIZE_MAX)) {
      found = true;
      least.limit_bytes = limit;
      least.current_bytes = current == SIZE_MAX ? 0 : current;
    }
    if (group.find('/') == std::string::npos) {
      return least;
    }
  }
}

GroupMemory least_of_groups(const std::string& root) {
  const std::string mount = root + "/sys/fs/cgroup";
  const GroupMemory second =
      read_groups({mount, group_of(root, ""), "memory.max", "memory.current"});
  const GroupMemory first = read_groups(
      {mount + "/memory",
       group_of(root, "memory"),
       "memory.limit_in_bytes",
       "memory.usage_in_bytes"});
  const bool use_first = first.limit_bytes < second.limit_bytes ||
                         (first.limit_bytes == second.limit_bytes && second.current_bytes == 0);
  return use_first ? first : second;
}

/// A value of /proc/meminfo in bytes; `otherwise` if it is not there.
size_t read_meminfo(const std::string& root, const std::string& wanted, size_t otherwise) {
  for (const std::string& line : read_lines(root + "/proc/meminfo")) { // name: kibibytes kB
    if (line.compare(0, wanted.size(), wanted) == 0) {
      const size_t kib = parse_number(line.substr(wanted.size()), SIZE_MAX);
      return kib == SIZE_MAX ? otherwise : kib * 1024;
    }
  }
  return otherwise;
}

} // namespace

size_t physical_bytes(const std::string& root) {
  const size_t pages = static_cast<size_t>(std::max(0L, sysconf(_SC_PHYS_PAGES)));
  const size_t page_bytes = static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
  return read_meminfo(root, "MemTotal:", pages * page_bytes);
}

size_t available_bytes(const std::string& root) {
  return read_meminfo(root, "MemAvailable:", physical_bytes(root));
}

size_t cgroup_limit_bytes(const std::string& root) {
  return least_of_groups(root).limit_bytes;
}

size_t cgroup_current_bytes(const std::string& root) {
  return least_of_groups(root).current_bytes;
}

size_t default_host_limit_bytes(const std::string& root) {
  return std::min(physical_bytes(root), cgroup_limit_bytes(root)) / 10 * 8;
}

} // namespace torch_lms
