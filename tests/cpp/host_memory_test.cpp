#include <entity/HostMemory.h>

#include <sys/stat.h>

#include <cstdint>
#include <fstream>

#include "harness.h"
#include "temporary_directory.h"

namespace torch_lms {
namespace {

/// A tree of files in front of which nothing of the real system shows.
class FakeRoot {
 public:
  void write(const std::string& path, const std::string& text) {
    for (size_t slash = path.find('/', 1); slash != std::string::npos;
         slash = path.find('/', slash + 1)) {
      mkdir((directory_.path() + path.substr(0, slash)).c_str(), 0700);
    }
    std::ofstream(directory_.path() + path) << text;
  }
  const std::string& path() const {
    return directory_.path();
  }

 private:
  TemporaryDirectory directory_;
};

constexpr char kMemInfo[] =
    "MemTotal:       1000000 kB\nMemFree:          10000 kB\nMemAvailable:    400000 kB\n";

TEST(meminfo_is_read_in_kibibytes) {
  FakeRoot root;
  root.write("/proc/meminfo", kMemInfo);
  CHECK_EQ(physical_bytes(root.path()), 1000000 * 1024);
  CHECK_EQ(available_bytes(root.path()), 400000 * 1024);
}

TEST(without_meminfo_the_system_is_asked) {
  FakeRoot root;
  CHECK(physical_bytes(root.path()) > size_t{1} << 20);
  CHECK_EQ(available_bytes(root.path()), physical_bytes(root.path()));
}

TEST(no_cgroup_is_no_limit) {
  FakeRoot root;
  CHECK_EQ(cgroup_limit_bytes(root.path()), SIZE_MAX);
  CHECK_EQ(cgroup_current_bytes(root.path()), 0);
}

TEST(version_2_takes_the_least_limit_up_to_the_root) {
  FakeRoot root;
  root.write("/proc/self/cgroup", "0::/a/b/c\n");
  root.write("/sys/fs/cgroup/a/b/c/memory.max", "max\n");
  root.write("/sys/fs/cgroup/a/b/c/memory.current", "100\n");
  root.write("/sys/fs/cgroup/a/b/memory.max", "5000\n");
  root.write("/sys/fs/cgroup/a/b/memory.current", "700\n");
  root.write("/sys/fs/cgroup/a/memory.max", "9000\n");
  root.write("/sys/fs/cgroup/a/memory.current", "900\n");
  CHECK_EQ(cgroup_limit_bytes(root.path()), 5000);
  CHECK_EQ(cgroup_current_bytes(root.path()), 700);
}

TEST(without_a_limit_the_processs_own_group_is_counted) {
  FakeRoot root;
  root.write("/proc/self/cgroup", "0::/a/b\n");
  root.write("/sys/fs/cgroup/a/b/memory.max", "max\n");
  root.write("/sys/fs/cgroup/a/b/memory.current", "100\n");
  root.write("/sys/fs/cgroup/a/memory.current", "900\n");
  CHECK_EQ(cgroup_limit_bytes(root.path()), SIZE_MAX);
  CHECK_EQ(cgroup_current_bytes(root.path()), 100);
}

TEST(inside_a_container_the_mount_is_the_group) {
  FakeRoot root; // the group's path is the host's, which is not visible here
  root.write("/proc/self/cgroup", "0::/system.slice/docker-1234.scope\n");
  root.write("/sys/fs/cgroup/memory.max", "2000000\n");
  root.write("/sys/fs/cgroup/memory.current", "30000\n");
  CHECK_EQ(cgroup_limit_bytes(root.path()), 2000000);
  CHECK_EQ(cgroup_current_bytes(root.path()), 30000);
}

TEST(version_1_finds_the_memory_controller) {
  FakeRoot root;
  root.write("/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:hugetlb,memory:/job/7\n1:name=systemd:/y\n");
  root.write("/sys/fs/cgroup/memory/job/7/memory.limit_in_bytes", "4096000\n");
  root.write("/sys/fs/cgroup/memory/job/7/memory.usage_in_bytes", "1000\n");
  root.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  CHECK_EQ(cgroup_limit_bytes(root.path()), 4096000);
  CHECK_EQ(cgroup_current_bytes(root.path()), 1000);
}

TEST(what_the_kernel_writes_for_no_limit_is_none) {
  for (const char* none :
       {"9223372036854771712\n", "18446744073709551615\n", "0\n", "max\n", "-1\n", ""}) {
    FakeRoot root;
    root.write("/proc/self/cgroup", "4:memory:/\n");
    root.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", none);
    root.write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "77\n");
    CHECK_EQ(cgroup_limit_bytes(root.path()), SIZE_MAX);
    CHECK_EQ(cgroup_current_bytes(root.path()), 77);
  }
}

TEST(with_both_versions_the_lesser_limit_counts) {
  FakeRoot root;
  root.write("/proc/self/cgroup", "4:memory:/v1\n0::/v2\n");
  root.write("/sys/fs/cgroup/memory/v1/memory.limit_in_bytes", "3000\n");
  root.write("/sys/fs/cgroup/memory/v1/memory.usage_in_bytes", "30\n");
  root.write("/sys/fs/cgroup/v2/memory.max", "8000\n");
  root.write("/sys/fs/cgroup/v2/memory.current", "80\n");
  CHECK_EQ(cgroup_limit_bytes(root.path()), 3000);
  CHECK_EQ(cgroup_current_bytes(root.path()), 30);
}

TEST(lines_that_make_no_sense_are_passed_over) {
  FakeRoot root;
  root.write("/proc/self/cgroup", "\nnonsense\n12\n0:only\n0::/a\n");
  root.write("/sys/fs/cgroup/a/memory.max", "many\n");
  root.write("/sys/fs/cgroup/memory.max", "123456\n");
  CHECK_EQ(cgroup_limit_bytes(root.path()), 123456);
}

TEST(the_default_is_four_fifths_of_what_is_allowed) {
  FakeRoot root;
  root.write("/proc/meminfo", kMemInfo);
  CHECK_EQ(default_host_limit_bytes(root.path()), 1000000 * 1024 / 10 * 8);
  root.write("/proc/self/cgroup", "0::/\n");
  root.write("/sys/fs/cgroup/memory.max", "500000\n");
  CHECK_EQ(default_host_limit_bytes(root.path()), 400000);
}

TEST(the_real_system_makes_sense) {
  CHECK(physical_bytes() > size_t{64} << 20);
  CHECK(available_bytes() > 0 && available_bytes() <= physical_bytes());
  CHECK(cgroup_limit_bytes() > 0);
  CHECK(default_host_limit_bytes() > 0 && default_host_limit_bytes() < physical_bytes());
}

} // namespace
} // namespace torch_lms
