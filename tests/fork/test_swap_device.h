#pragma once

// A device of the tests: main memory whose allocator and copies can be made to wait and to fail.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include <c10/core/impl/CpuTransferBackend.h>
#include <c10/core/impl/Error.h>
#include <c10/core/impl/HostPool.h>
#include <c10/core/impl/SwapDevice.h>
#include <c10/core/impl/SwapEnvironment.h>

/// What the device allocator throws.
struct OutOfDeviceMemory : std::runtime_error {
  OutOfDeviceMemory() : std::runtime_error("out of device memory") {}
};

/// Blocks of the device, counted.
class DeviceMemory {
 public:
  static DeviceMemory& get() {
    static auto* memory = new DeviceMemory();
    return *memory;
  }
  c10::DataPtr allocate(size_t nbytes) {
    if (used_.fetch_add(nbytes) + nbytes > limit_.load()) {
      used_.fetch_sub(nbytes);
      throw OutOfDeviceMemory();
    }
    auto* sized = static_cast<size_t*>(std::malloc(nbytes + kHeader));
    *sized = nbytes;
    void* data = reinterpret_cast<char*>(sized) + kHeader;
    return c10::DataPtr(data, data, &DeviceMemory::free, c10::kCPU);
  }
  static void free(void* data) {
    char* block = static_cast<char*>(data) - kHeader;
    const size_t nbytes = *reinterpret_cast<size_t*>(block);
    std::memset(data, 0xDD, nbytes); // whoever reads it now gets it wrong
    std::free(block);
    get().used_.fetch_sub(nbytes);
  }
  size_t used() const {
    return used_.load();
  }
  void set_limit(size_t limit) {
    limit_.store(limit);
  }

 private:
  static constexpr size_t kHeader = 64;
  std::atomic<size_t> used_{0};
  std::atomic<size_t> limit_{SIZE_MAX};
};

/// Copies wait here while it is shut.
class Gate {
 public:
  void shut() {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = false;
  }
  void open() {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  /// Only workers wait; returns when the gate opens, or the copy is cancelled.
  void pass(const std::atomic<bool>* cancelled) {
    std::unique_lock<std::mutex> lock(mutex_);
    ++arrived_;
    changed_.notify_all();
    while (!open_ && (cancelled == nullptr || !cancelled->load())) {
      changed_.wait_for(lock, std::chrono::milliseconds(1)); // a cancellation tells nobody
    }
  }
  /// Waits until so many copies have come since the last `reset`.
  void await_arrivals(int count) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return arrived_ >= count; });
  }
  void reset() {
    std::lock_guard<std::mutex> lock(mutex_);
    arrived_ = 0;
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
  int arrived_ = 0;
};

/// `CpuTransferBackend` with gates before the copies of workers.
class GatedBackend final : public torch_lms::TransferBackend {
 public:
  explicit GatedBackend(std::shared_ptr<torch_lms::HostPool> pool) : copies_(std::move(pool)) {}

  bool copies_asynchronously() const noexcept override {
    return false;
  }
  void* allocate_host(size_t nbytes) override {
    return copies_.allocate_host(nbytes);
  }
  void free_host(void* host, torch_lms::FencePtr after) noexcept override {
    copies_.free_host(host, std::move(after));
  }
  torch_lms::FencePtr submitted_work() override {
    return nullptr;
  }
  torch_lms::FencePtr copy_to_host(
      void* host,
      const void* device,
      size_t nbytes,
      const torch_lms::FencePtr& after,
      const std::atomic<bool>& cancelled) override {
    out.pass(&cancelled);
    if (failing.load()) {
      throw torch_lms::TransferFailed("the copy failed");
    }
    return copies_.copy_to_host(host, device, nbytes, after, cancelled);
  }
  torch_lms::FencePtr copy_to_device(
      void* device,
      const void* host,
      size_t nbytes,
      const torch_lms::FencePtr& after) override {
    if (c10::impl::on_swap_worker()) {
      in.pass(nullptr);
    }
    return copies_.copy_to_device(device, host, nbytes, after);
  }
  void order_after(const torch_lms::FencePtr&) override {}

  Gate out;
  Gate in;
  std::atomic<bool> failing{false};

 private:
  torch_lms::CpuTransferBackend copies_;
};

class TestSwapDevice final : public c10::impl::SwapDevice {
 public:
  static TestSwapDevice& get() {
    static auto* device = new TestSwapDevice();
    return *device;
  }
  c10::Device device() const override {
    return c10::Device(c10::kCPU);
  }
  const std::shared_ptr<torch_lms::TransferBackend>& backend() const override {
    return backend_;
  }
  bool owns(const c10::DataPtr& data) const override {
    return data.get_deleter() == &DeviceMemory::free;
  }
  int64_t current_stream() const override {
    return 0;
  }
  void note_streams_in_use() override {}
  void note_current_stream() override {}
  void note_use(const c10::DataPtr&, int64_t) override {}
  c10::DataPtr allocate(size_t nbytes, int64_t) override {
    try {
      return DeviceMemory::get().allocate(nbytes);
    } catch (const OutOfDeviceMemory&) {
      if (c10::impl::on_swap_worker()) {
        throw torch_lms::NoRoom("no room for a prefetch");
      }
      throw;
    }
  }
  void keep_block_for_copy(const c10::DataPtr&) override {}
  void keep_block_for_arrival(const c10::DataPtr&) override {}
  bool capturing() const override {
    return captures.load();
  }
  void set_host_limit(size_t limit_bytes) override {
    pool->set_limit(limit_bytes != 0 ? limit_bytes : SIZE_MAX);
  }
  torch_lms::HostPool& host_pool() const override {
    return *pool;
  }

  GatedBackend& gated() {
    return static_cast<GatedBackend&>(*backend_);
  }

  std::atomic<bool> captures{false};
  const std::shared_ptr<torch_lms::HostPool> pool;

 private:
  TestSwapDevice()
      : pool(
            std::make_shared<torch_lms::HostPool>(
                std::make_unique<torch_lms::AnonymousSlabSource>(size_t{1} << 20),
                torch_lms::HostPoolOptions())),
        backend_(std::make_shared<GatedBackend>(pool)) {}

  const std::shared_ptr<torch_lms::TransferBackend> backend_;
};

/// The environment owns its devices; this one outlives it.
inline c10::impl::SwapDevice* make_test_device(c10::DeviceIndex) {
  return &TestSwapDevice::get();
}

inline const bool& test_device_registered() {
  static const bool registered = [] {
    c10::impl::SwapDeviceType devices;
    devices.make = &make_test_device;
    c10::impl::register_swap_devices(c10::kCPU, devices);
    return true;
  }();
  return registered;
}

/// A storage on the test device whose bytes follow from `seed`.
inline c10::Storage make_storage(size_t nbytes, unsigned seed) {
  c10::Storage storage(
      c10::Storage::use_byte_size_t(),
      nbytes,
      DeviceMemory::get().allocate(nbytes),
      nullptr,
      /*resizable=*/false);
  auto* bytes = static_cast<unsigned char*>(storage.data());
  for (size_t i = 0; i < nbytes; ++i) {
    bytes[i] = static_cast<unsigned char>(i * 31 + seed);
  }
  return storage;
}

/// Accesses a storage and compares its bytes.
inline bool holds(const c10::Storage& storage, unsigned seed) {
  const auto* bytes = static_cast<const unsigned char*>(storage.data());
  for (size_t i = 0; i < storage.nbytes(); ++i) {
    if (bytes[i] != static_cast<unsigned char>(i * 31 + seed)) {
      return false;
    }
  }
  return true;
}

/// An open environment on a device without faults; closes it, and finds nothing left.
class OpenEnvironment {
 public:
  explicit OpenEnvironment(size_t host_limit_bytes = 0) {
    static_cast<void>(test_device_registered());
    environment.open(host_limit_bytes);
  }
  ~OpenEnvironment() {
    TestSwapDevice& device = TestSwapDevice::get();
    device.captures = false;
    device.gated().failing = false;
    device.gated().out.reset();
    device.gated().in.reset();
    DeviceMemory::get().set_limit(SIZE_MAX);
    if (environment.is_open()) {
      environment.close();
    }
  }
  OpenEnvironment(const OpenEnvironment&) = delete;
  OpenEnvironment& operator=(const OpenEnvironment&) = delete;

  bool pageout(const c10::Storage& storage) {
    return environment.pageout(*storage.unsafeGetStorageImpl());
  }
  bool prefetch(const c10::Storage& storage) {
    return environment.prefetch(*storage.unsafeGetStorageImpl());
  }
  torch_lms::EntityState state(const c10::Storage& storage) {
    return environment.state(*storage.unsafeGetStorageImpl());
  }
  /// Storages whose seeds are their places, on their way out.
  std::vector<c10::Storage> paging_out(unsigned count, size_t nbytes) {
    std::vector<c10::Storage> storages;
    for (unsigned i = 0; i < count; ++i) {
      storages.push_back(make_storage(nbytes, i));
      pageout(storages.back());
    }
    return storages;
  }
  void pageout_and_wait(const c10::Storage& storage) {
    pageout(storage);
    environment.wait_pageouts();
  }

  c10::impl::SwapEnvironment& environment = c10::impl::SwapEnvironment::get();
  GatedBackend& backend = TestSwapDevice::get().gated();
};
