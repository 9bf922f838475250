#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include <extension/memory/Device.h>

namespace torch_lms {

struct HostOptions {
  size_t limit_bytes = 0; ///< 0: derived from the machine's and the cgroup's memory.
  std::string spill_dir; ///< Empty: the system's directory for temporary files.
};

/// The devices of this process, made as they are asked for, and the host pools behind them.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. `find`
/// blocks while a device is being made, the others on nothing.
class Devices {
 public:
  static constexpr size_t kMost = 65; // the CPU, then CUDA devices

  /// The place of a device, the CPU's or a CUDA one, below `kMost`. Throws IndexError.
  static size_t index_of(c10::Device device);

  /// Null if entities do not exist for its type.
  Device* find(c10::Device device);

  /// The same if it has been asked for before, else null: makes no device.
  Device* known(c10::Device device) const;

  /// Every device that has been found so far. Takes no lock, so also for a forked child.
  void for_each(const std::function<void(Device&)>& visit) const;

  /// Options of the pools that are made from now on, and the limit of those that
  /// exist already. Throws SpillFailed if a spill directory is in use and another given.
  void configure_host(const HostOptions& requested);

  /// For tests: stands for the device of its type from now on. Before any `find` of it.
  void put(std::unique_ptr<Device> device);

 private:
  std::shared_ptr<HostPool> make_spill_pool();
  Device* make(c10::Device device);

  std::array<std::atomic<Device*>, kMost> devices_{};
  std::mutex mutex_; // of who makes one; guards what follows
  HostOptions options_;
  std::shared_ptr<HostPool> pinned_pool_;
  std::shared_ptr<HostPool> spill_pool_;
};

} // namespace torch_lms
