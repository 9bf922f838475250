#pragma once

#include <array>
#include <atomic>

#include <extension/base/Options.h>
#include <extension/memory/Devices.h>
#include <extension/policy/DeviceWatch.h>
#include <extension/policy/Placeholders.h>
#include <extension/trace/CycleTracker.h>
#include <extension/transfer/Pager.h>

namespace torch_lms {

/// Who has ops shown to the policy (`OpCallbacks`).
class OpFeed {
 public:
  virtual ~OpFeed() = default;
  /// From now on ops tell what they use and what they make.
  virtual void start() = 0;
  /// Ops need not tell any more.
  virtual void stop() = 0;
};

/// Who wants to know how the program goes on, and can do without some of its storages (`Planning`).
class PolicyListener {
 public:
  virtual ~PolicyListener() = default;
  /// A backward has ended, and something else begun, with an op that has just ended.
  virtual void backward_ended() = 0;
  /// Much of the host's room is taken, and more goes out on demand: see Note [A host that fills].
  virtual void host_fills() = 0;
  /// RESIDENT -> DROPPED, if it can be made again. Not inside a foreign call.
  virtual bool drop(const EntityPtr& entity) = 0;
  /// An op that runs on this thread has begun to wait for room, or gone on.
  virtual void wait_begins(Device& device) = 0;
  virtual void wait_ends(Device& device) noexcept = 0;
};

/// While one of these lives the op on this thread waits.
class OpWaits {
 public:
  OpWaits(PolicyListener& listener, Device& device) : listener_(listener), device_(device) {
    listener_.wait_begins(device_);
  }
  ~OpWaits() {
    listener_.wait_ends(device_);
  }
  OpWaits(const OpWaits&) = delete;
  OpWaits& operator=(const OpWaits&) = delete;

 private:
  PolicyListener& listener_;
  Device& device_;
};

/// What the parts of the policy have in common.
///
/// Thread-safe, but for what is set up before anything else is called. Blocks on nothing but
/// mutexes.
struct PolicyState {
  PolicyState(Pager& the_pager, const PolicyOptions& the_options)
      : pager(the_pager), options(the_options) {}

  DeviceWatch& watch_of(const Device& device) {
    return watches[Devices::index_of(device.device())];
  }
  void note_allocation(Device& device, size_t nbytes, size_t used_bytes) {
    watch_of(device).note_allocation(nbytes, used_bytes, pager.off_device_bytes());
  }

  Pager& pager;
  const PolicyOptions options;
  OpFeed* feed = nullptr; ///< Set up, as the next.
  PolicyListener* listener = nullptr;
  CycleTracker cycles;
  std::array<DeviceWatch, Devices::kMost> watches;
  Placeholders placeholders;
  std::atomic<bool> planned{false}; ///< Nothing goes or comes ahead of need but by a plan.
  std::atomic<bool> gave_way{false}; ///< And what is beyond the limit is still there.
};

} // namespace torch_lms
