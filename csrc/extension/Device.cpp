#include <extension/Device.h>

#include <sys/statvfs.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>

#include <entity/Error.h>
#include <entity/HostMemory.h>

#include <extension/CpuDevice.h>
#include <extension/MemoryPressure.h>

#ifdef TORCH_LMS_WITH_CUDA
#include <extension/cuda/CudaDevice.h>
#endif

namespace torch_lms {
namespace {

constexpr size_t kSpillSlabBytes = size_t{256} << 20;
#ifdef TORCH_LMS_WITH_CUDA
constexpr size_t kPinnedSlabBytes = size_t{1} << 30;
#endif

// Read without a lock, also in a forked child.
std::array<std::atomic<Device*>, kMaxDevices> devices{};
std::mutex make_mutex;
HostOptions options;
std::shared_ptr<HostPool>* pinned_pool = nullptr;
std::shared_ptr<HostPool>* spill_pool = nullptr;

std::string default_spill_dir() {
  const char* directory = std::getenv("TMPDIR");
  return directory != nullptr && *directory != '\0' ? directory : "/tmp";
}

/// Files take disk, not memory: by default all of it but a tenth.
size_t default_spill_limit_bytes(const std::string& directory) {
  struct statvfs info{};
  if (statvfs(directory.c_str(), &info) != 0) {
    throw SpillFailed(
        "expected a directory to spill to, found none at '" + directory +
        "'; create it or name another with spill_dir=");
  }
  return static_cast<size_t>(info.f_bavail) * info.f_frsize / 10 * 9;
}

std::shared_ptr<HostPool> make_spill_pool() {
  const std::string directory = options.spill_dir.empty() ? default_spill_dir() : options.spill_dir;
  HostPoolOptions pool;
  pool.limit_bytes =
      options.limit_bytes != 0 ? options.limit_bytes : default_spill_limit_bytes(directory);
  return std::make_shared<HostPool>(
      std::make_unique<FileSlabSource>(directory, kSpillSlabBytes), pool);
}

Device* make_device(c10::Device device) {
  if (device.is_cpu()) {
    if (spill_pool == nullptr) {
      spill_pool = new std::shared_ptr<HostPool>(make_spill_pool());
    }
    return new CpuDevice(*spill_pool);
  }
#ifdef TORCH_LMS_WITH_CUDA
  if (device.is_cuda()) {
    if (pinned_pool == nullptr) {
      HostPoolOptions pool;
      pool.limit_bytes =
          options.limit_bytes != 0 ? options.limit_bytes : default_host_limit_bytes();
      pinned_pool = new std::shared_ptr<HostPool>(
          std::make_shared<HostPool>(std::make_unique<PinnedSlabSource>(kPinnedSlabBytes), pool));
    }
    return new CudaDevice(device.index(), *pinned_pool);
  }
#endif
  return nullptr;
}

} // namespace

size_t index_of(c10::Device device) {
  const size_t index = device.is_cuda() ? static_cast<size_t>(device.index()) + 1 : 0;
  TORCH_CHECK_INDEX(index < kMaxDevices, "torch_lms: expected at most 64 CUDA devices");
  return index;
}

Device* known_device(c10::Device device) {
  if (!device.is_cpu() && !device.is_cuda()) {
    return nullptr;
  }
  return devices[index_of(device)].load(std::memory_order_acquire);
}

Device* find_device(c10::Device device) {
  if (!device.is_cpu() && !device.is_cuda()) {
    return nullptr;
  }
  const size_t index = index_of(device);
  if (Device* found = devices[index].load(std::memory_order_acquire)) {
    return found;
  }
  std::lock_guard<std::mutex> lock(make_mutex);
  Device* found = devices[index].load(std::memory_order_acquire);
  if (found == nullptr) {
    found = make_device(device);
    devices[index].store(found, std::memory_order_release);
  }
  return found;
}

Device& find_device_of(const EntityStorageImpl& entity) {
  for (const auto& entry : devices) {
    Device* device = entry.load(std::memory_order_acquire);
    if (device != nullptr && device->backend().get() == entity.backend()) {
      return *device;
    }
  }
  TORCH_INTERNAL_ASSERT(false, "an entity without a device");
}

void for_each_device(void (*visit)(Device&, void*), void* context) {
  for (const auto& entry : devices) {
    if (Device* device = entry.load(std::memory_order_acquire)) {
      visit(*device, context);
    }
  }
}

void configure_host(const HostOptions& requested) {
  std::lock_guard<std::mutex> lock(make_mutex);
  const std::string in_use = options.spill_dir.empty() ? default_spill_dir() : options.spill_dir;
  if (!requested.spill_dir.empty() && requested.spill_dir != in_use) {
    default_spill_limit_bytes(requested.spill_dir); // throws if it is not there
    auto files = std::make_unique<FileSlabSource>(requested.spill_dir, kSpillSlabBytes);
    if (spill_pool != nullptr && !(*spill_pool)->replace_source(std::move(files))) {
      throw SpillFailed(
          "expected the spill directory that is in use ('" + in_use + "'), found '" +
          requested.spill_dir + "'; name another when nothing is paged out");
    }
    options.spill_dir = requested.spill_dir;
  }
  if (requested.limit_bytes != 0) {
    options.limit_bytes = requested.limit_bytes;
    for (auto* pool : {spill_pool, pinned_pool}) {
      if (pool != nullptr) {
        (*pool)->set_limit(requested.limit_bytes);
      }
    }
  }
}

} // namespace torch_lms
