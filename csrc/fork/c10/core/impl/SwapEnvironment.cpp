#include <c10/core/impl/SwapEnvironment.h>

#include <pthread.h>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include <c10/core/impl/Error.h>
#include <c10/core/impl/ForkGate.h>
#include <c10/core/impl/OpClock.h>
#include <c10/core/impl/SwapCounters.h>

namespace c10 {
namespace impl {
namespace {

constexpr size_t kMaxPageoutBytes = size_t{1} << 30;

// Note [Prefetches begin at once]
// A page-in's copy comes after all work that has been submitted when its block is allocated: the
// block may be one that this work still uses. So a prefetch that the worker begins late, when the
// program has submitted more, comes after that too, and the device waits for the link instead of
// working beside it. The worker therefore has room for what a program prefetches some layers
// ahead, and begins it as soon as it is asked for.
constexpr size_t kMaxPageinBytes = size_t{4} << 30;

void begin_worker() {
  mark_swap_worker();
  for (const SwapDeviceType& devices : swap_device_types()) {
    if (devices.prepare_worker != nullptr) {
      devices.prepare_worker();
    }
  }
}

// The memory of a storage is the pager's while it moves, and freeing it needs neither
// Python's lock nor the thread that runs ops: the workers commit.

void commit_pageout(torch_lms::FinishedTransfer& finished) {
  if (finished.out != nullptr && finished.out->host != nullptr) {
    std::unique_ptr<torch_lms::DeviceBlock> garbage;
    finished.entity->commit_pageout(finished.out, &garbage);
  }
}

void commit_pagein(torch_lms::FinishedTransfer& finished) {
  if (finished.in != nullptr) {
    finished.entity->commit_pagein(finished.in);
  }
}

[[noreturn]] void refuse(const StorageImpl& storage, const std::string& why) {
  throw torch_lms::PageoutRefused(
      "expected a tensor that can be paged out, found one of " + std::to_string(storage.nbytes()) +
      " bytes on " + storage.device().str() + ": " + why +
      "; leave it where it is, or page out a copy of it (tensor.clone())");
}

} // namespace

SwapCounters& swap_counters() noexcept {
  static auto* counters = new SwapCounters();
  return *counters;
}

SwapEnvironment& SwapEnvironment::get() {
  static auto* environment = new SwapEnvironment();
  return *environment;
}

SwapEnvironment::SwapEnvironment()
    : out_(torch_lms::TransferDirection::kOut, kMaxPageoutBytes, &begin_worker, &commit_pageout),
      in_(torch_lms::TransferDirection::kIn, kMaxPageinBytes, &begin_worker, &commit_pagein) {
  torch_lms::OpClock::watch_forks(); // first: its lock comes after the environment's
  pthread_atfork(
      [] { get().prepare_fork(); },
      [] { get().after_fork_in_parent(); },
      [] { get().after_fork_in_child(); });
}

// --- open and close -------------------------------------------------------------

void SwapEnvironment::check_open() const {
  out_.check_not_forked();
  if (!is_open()) {
    throw torch_lms::Error(
        "expected an open swap environment, found none; call torch.cuda.create_swap_env() first");
  }
}

void SwapEnvironment::open(size_t host_limit_bytes) {
  out_.check_not_forked();
  std::lock_guard<std::mutex> lock(open_mutex_);
  if (is_open()) {
    throw torch_lms::Error(
        "expected no open swap environment, found one; call torch.cuda.close_swap_env() first");
  }
  const SwapDeviceTypes& types = swap_device_types();
  if (std::none_of(types.begin(), types.end(), [](const SwapDeviceType& devices) {
        return devices.make != nullptr;
      })) {
    throw torch_lms::Error(
        "expected a PyTorch built with CUDA, found one without; rebuild it, or set "
        "TORCH_SWAP_CPU=1 before the program starts to page main memory out to files, for tests");
  }
  set_host_limit(host_limit_bytes);
  in_.open();
  out_.start_actions();
  times_opened_.fetch_add(1, std::memory_order_acq_rel);
  open_.store(true, std::memory_order_release);
}

void SwapEnvironment::set_host_limit(size_t limit_bytes) {
  out_.check_not_forked();
  std::lock_guard<std::mutex> lock(devices_mutex_);
  host_limit_bytes_ = limit_bytes;
  for (const auto& device : devices_) {
    if (device != nullptr) {
      device->set_host_limit(limit_bytes);
    }
  }
}

void SwapEnvironment::close() {
  out_.check_not_forked();
  std::lock_guard<std::mutex> lock(open_mutex_);
  check_open();
  open_.store(false, std::memory_order_release);
  std::exception_ptr failed;
  const auto attempt = [&failed](const std::function<void()>& step) {
    try {
      step();
    } catch (...) {
      failed = failed != nullptr ? failed : std::current_exception();
    }
  };
  attempt([this] { out_.wait_and_stop_actions(); });
  attempt([this] { stop_pageins(); });
  attempt([this] { pagein_all(); });
  if (failed != nullptr) {
    std::rethrow_exception(failed);
  }
}

// A prefetch that cannot be followed is no failure: the access will page in.

void SwapEnvironment::stop_pageins() {
  in_.start_actions();
  try {
    in_.wait_and_stop_actions();
  } catch (const torch_lms::NoRoom&) {
  }
}

void SwapEnvironment::wait_pending_pageins() {
  out_.check_not_forked();
  try {
    in_.wait_pending();
  } catch (const torch_lms::NoRoom&) {
  }
}

void SwapEnvironment::wait_pending_pageouts() {
  out_.check_not_forked();
  out_.wait_pending();
}

void SwapEnvironment::pagein_all() {
  std::vector<std::weak_ptr<EntityPaging>> pagings;
  {
    std::lock_guard<std::mutex> lock(pagings_mutex_);
    pagings = pagings_;
  }
  std::exception_ptr failed;
  for (const auto& weak : pagings) {
    const std::shared_ptr<EntityPaging> paging = weak.lock();
    if (paging == nullptr) {
      continue;
    }
    const ForkGate::Passage passage;
    std::lock_guard<std::mutex> lock(paging->mutex());
    if (paging->entity()->gone() ||
        paging->entity()->state() == torch_lms::EntityState::kResident) {
      continue;
    }
    try {
      paging->pagein_locked();
    } catch (...) {
      failed = std::current_exception();
    }
  }
  if (failed != nullptr) {
    std::rethrow_exception(failed);
  }
}

// --- queues ----------------------------------------------------------------------

void SwapEnvironment::prefetch_init() {
  check_open();
  stop_pageins();
  in_.open();
}

void SwapEnvironment::prefetch_all() {
  check_open();
  in_.start_actions();
}

void SwapEnvironment::wait_pageouts() {
  check_open();
  out_.wait_actions();
}

bool SwapEnvironment::pageout(StorageImpl& storage) {
  check_open();
  if (storage.nbytes() == 0) {
    return false;
  }
  SwapDevice& device = find_device(storage.device());
  return find_or_install_pager(storage, device).pageout(storage.data_ptr_without_pagein());
}

bool SwapEnvironment::prefetch(StorageImpl& storage) {
  check_open();
  auto* pager = dynamic_cast<EntityPager*>(storage.pager());
  return pager != nullptr && pager->prefetch();
}

torch_lms::EntityState SwapEnvironment::state(const StorageImpl& storage) const {
  const auto* pager = dynamic_cast<const EntityPager*>(storage.pager());
  return pager != nullptr ? pager->paging()->entity()->state() : torch_lms::EntityState::kResident;
}

SwapStats SwapEnvironment::stats() {
  const SwapCounters& counters = swap_counters();
  SwapStats stats;
  stats.pageouts = counters.pageouts.load();
  stats.pageout_bytes = counters.pageout_bytes.load();
  stats.pageins = counters.pageins.load();
  stats.pagein_bytes = counters.pagein_bytes.load();
  stats.passive_pageins = counters.passive_pageins.load();
  stats.prefetches = counters.prefetches.load();
  stats.prefetch_hits = counters.prefetch_hits.load();
  stats.cancelled_pageouts = counters.cancelled_pageouts.load();
  stats.pagein_failures = counters.pagein_failures.load();
  stats.paged_out_storages = counters.paged_out_storages.load();
  stats.paged_out_bytes = counters.paged_out_bytes.load();
  {
    std::lock_guard<std::mutex> lock(pagings_mutex_);
    stats.tracked_storages = static_cast<int64_t>(pagings_.size());
  }
  std::lock_guard<std::mutex> lock(devices_mutex_);
  visit_pools_locked([&stats](const torch_lms::HostPool& pool) {
    const torch_lms::HostPoolStats more = pool.stats();
    stats.host.slab_bytes += more.slab_bytes;
    stats.host.used_bytes += more.used_bytes;
    stats.host.limit_bytes += more.limit_bytes;
  });
  return stats;
}

// --- devices and pagers ------------------------------------------------------------

SwapDevice& SwapEnvironment::find_device(Device device) {
  const SwapDeviceType& type = swap_device_types()[static_cast<size_t>(device.type())];
  if (type.make == nullptr) {
    throw torch_lms::PageoutRefused(
        "expected a tensor on a CUDA device, found one on " + device.str() +
        "; only device memory can be paged out (main memory too, for tests, with "
        "TORCH_SWAP_CPU=1)");
  }
  const size_t index = device.is_cuda() ? static_cast<size_t>(device.index()) + 1 : 0;
  TORCH_CHECK_INDEX(index < kMaxDevices, "expected at most 64 CUDA devices");
  std::lock_guard<std::mutex> lock(devices_mutex_);
  std::unique_ptr<SwapDevice>& found = devices_[index];
  if (found == nullptr) {
    found.reset(type.make(device.index()));
    found->set_host_limit(host_limit_bytes_);
  }
  return *found;
}

EntityPager& SwapEnvironment::find_or_install_pager(StorageImpl& storage, SwapDevice& device) {
  auto* pager = dynamic_cast<EntityPager*>(storage.pager());
  if (pager != nullptr && pager->paging()->entity()->nbytes() != storage.nbytes()) {
    // Resized in place since: what has been one entity is another now.
    DataPtr data = storage.set_data_ptr(DataPtr(nullptr, storage.device()));
    storage.set_data_ptr_noswap(std::move(data));
    pager = nullptr;
  }
  if (pager == nullptr) {
    if (!device.owns(storage.data_ptr_without_pagein())) {
      refuse(
          storage,
          "its memory does not belong to PyTorch's allocator for the device (shared, foreign or "
          "IPC memory, an uncached allocation, or a C++ object)");
    }
    auto made = std::make_unique<EntityPager>(device, storage.nbytes(), SwapQueues{out_, in_});
    remember(made->paging());
    pager = dynamic_cast<EntityPager*>(storage.install_pager(std::move(made)));
    if (pager == nullptr) {
      refuse(storage, "another pager keeps it");
    }
  }
  return *pager;
}

void SwapEnvironment::remember(const std::shared_ptr<EntityPaging>& paging) {
  std::lock_guard<std::mutex> lock(pagings_mutex_);
  if (pagings_.size() >= prune_at_) {
    const auto expired = [](const std::weak_ptr<EntityPaging>& weak) { return weak.expired(); };
    pagings_.erase(std::remove_if(pagings_.begin(), pagings_.end(), expired), pagings_.end());
    prune_at_ = std::max(size_t{1024}, 2 * pagings_.size());
  }
  pagings_.push_back(paging);
}

/// Each pool once: devices may share one. Takes no memory.
template <typename Visit>
void SwapEnvironment::visit_pools_locked(const Visit& visit) {
  for (size_t i = 0; i < devices_.size(); ++i) {
    const auto has_pool = [this, i](const std::unique_ptr<SwapDevice>& device) {
      return device != nullptr && &device->host_pool() == &devices_[i]->host_pool();
    };
    if (devices_[i] != nullptr && std::none_of(devices_.begin(), devices_.begin() + i, has_pool)) {
      visit(devices_[i]->host_pool());
    }
  }
}

// --- forks ------------------------------------------------------------------------

void SwapEnvironment::prepare_fork() {
  open_mutex_.lock(); // who opens or closes it pages, and waits for workers
  ForkGate::get().close();
  out_.prepare_fork();
  in_.prepare_fork();
  pagings_mutex_.lock();
  devices_mutex_.lock();
  visit_pools_locked([](torch_lms::HostPool& pool) { pool.prepare_fork(); });
}

void SwapEnvironment::after_fork_in_parent() noexcept {
  after_fork(&torch_lms::HostPool::after_fork_in_parent, &Queue::after_fork_in_parent);
}

void SwapEnvironment::after_fork_in_child() noexcept {
  // The parent may reuse the host memory of what is out: the child gets a copy of its own.
  after_fork(&torch_lms::HostPool::reclone_after_fork, &Queue::after_fork_in_child);
}

void SwapEnvironment::after_fork(
    void (torch_lms::HostPool::*of_pool)(),
    void (Queue::*of_queue)()) noexcept {
  visit_pools_locked([of_pool](torch_lms::HostPool& pool) { (pool.*of_pool)(); });
  devices_mutex_.unlock();
  pagings_mutex_.unlock();
  (in_.*of_queue)();
  (out_.*of_queue)();
  ForkGate::get().open();
  open_mutex_.unlock();
}

} // namespace impl
} // namespace c10
