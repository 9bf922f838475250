#pragma once

#include <cstddef>
#include <string>

namespace torch_lms {

// What the machine and its control groups allow. `root` stands in front of /proc and
// /sys, for tests. Every function reads the files again and is thread-safe.

/// The machine's memory in bytes.
size_t physical_bytes(const std::string& root = "");

/// Memory that can be had without swapping (MemAvailable), in bytes; all of it where
/// the system does not say.
size_t available_bytes(const std::string& root = "");

/// The least memory limit of the process's control group and the groups above it,
/// version 2 or 1, in bytes; SIZE_MAX for none.
size_t cgroup_limit_bytes(const std::string& root = "");

/// The memory charged to the group whose limit is the least (the process's own where
/// none has a limit), in bytes; 0 if unknown. The limit less this is what is left.
size_t cgroup_current_bytes(const std::string& root = "");

/// 80 % of what the machine and the control groups allow, in bytes.
size_t default_host_limit_bytes(const std::string& root = "");

} // namespace torch_lms
