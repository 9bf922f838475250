#pragma once

#include <cstddef>
#include <string>

namespace torch_lms {

/// The machine's memory in bytes.
size_t physical_bytes();

/// Memory that can be had without swapping (MemAvailable), in bytes.
size_t available_bytes(const std::string& root = "");

/// The least memory limit of the process's control groups; SIZE_MAX for none.
/// `root` stands in front of /proc and /sys, for tests.
size_t cgroup_limit_bytes(const std::string& root = "");

/// 80 % of what the machine and the control groups allow.
size_t default_host_limit_bytes(const std::string& root = "");

} // namespace torch_lms
