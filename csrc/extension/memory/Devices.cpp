#include <extension/memory/Devices.h>

#include <sys/statvfs.h>

#include <cstdlib>
#include <utility>

#include <entity/Error.h>
#include <entity/HostMemory.h>

#include <extension/memory/CpuDevice.h>

#ifdef TORCH_LMS_WITH_CUDA
#include <extension/cuda/CudaDevice.h>
#endif

namespace torch_lms {
namespace {

constexpr size_t kSpillSlabBytes = size_t{256} << 20;
#ifdef TORCH_LMS_WITH_CUDA
constexpr size_t kPinnedSlabBytes = size_t{1} << 30;
#endif

std::string spill_dir_of(const HostOptions& options) {
  const char* directory = std::getenv("TMPDIR");
  return !options.spill_dir.empty()                   ? options.spill_dir
         : directory != nullptr && *directory != '\0' ? directory
                                                      : "/tmp";
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

} // namespace

size_t Devices::index_of(c10::Device device) {
  const size_t index = device.is_cuda() ? static_cast<size_t>(device.index()) + 1 : 0;
  TORCH_CHECK_INDEX(index < kMost, "torch_lms: expected at most 64 CUDA devices");
  return index;
}

Device* Devices::known(c10::Device device) const {
  if (!device.is_cpu() && !device.is_cuda()) {
    return nullptr;
  }
  return devices_[index_of(device)].load(std::memory_order_acquire);
}

Device* Devices::find(c10::Device device) {
  if (!device.is_cpu() && !device.is_cuda()) {
    return nullptr;
  }
  if (Device* found = known(device)) {
    return found;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  Device* found = known(device);
  if (found == nullptr) {
    found = make(device);
    devices_[index_of(device)].store(found, std::memory_order_release);
  }
  return found;
}

void Devices::put(std::unique_ptr<Device> device) {
  const size_t index = index_of(device->device());
  devices_[index].store(device.release(), std::memory_order_release);
}

void Devices::for_each(const std::function<void(Device&)>& visit) const {
  for (const auto& entry : devices_) {
    if (Device* device = entry.load(std::memory_order_acquire)) {
      visit(*device);
    }
  }
}

std::shared_ptr<HostPool> Devices::make_spill_pool() {
  const std::string directory = spill_dir_of(options_);
  HostPoolOptions pool;
  pool.limit_bytes =
      options_.limit_bytes != 0 ? options_.limit_bytes : default_spill_limit_bytes(directory);
  return std::make_shared<HostPool>(
      std::make_unique<FileSlabSource>(directory, kSpillSlabBytes), pool);
}

Device* Devices::make(c10::Device device) {
  if (device.is_cpu()) {
    if (spill_pool_ == nullptr) {
      spill_pool_ = make_spill_pool();
    }
    return new CpuDevice(spill_pool_);
  }
#ifdef TORCH_LMS_WITH_CUDA
  if (device.is_cuda()) {
    if (pinned_pool_ == nullptr) {
      HostPoolOptions pool;
      pool.limit_bytes =
          options_.limit_bytes != 0 ? options_.limit_bytes : default_host_limit_bytes();
      pinned_pool_ =
          std::make_shared<HostPool>(std::make_unique<PinnedSlabSource>(kPinnedSlabBytes), pool);
    }
    return new CudaDevice(device.index(), pinned_pool_);
  }
#endif
  return nullptr;
}

void Devices::configure_host(const HostOptions& requested) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::string in_use = spill_dir_of(options_);
  if (!requested.spill_dir.empty() && requested.spill_dir != in_use) {
    const size_t limit_bytes = default_spill_limit_bytes(requested.spill_dir); // if it is there
    auto files = std::make_unique<FileSlabSource>(requested.spill_dir, kSpillSlabBytes);
    if (spill_pool_ != nullptr && !spill_pool_->replace_source(std::move(files))) {
      throw SpillFailed(
          "expected the spill directory that is in use ('" + in_use + "'), found '" +
          requested.spill_dir + "'; name another when nothing is paged out");
    }
    options_.spill_dir = requested.spill_dir;
    if (spill_pool_ != nullptr && options_.limit_bytes == 0) {
      spill_pool_->set_limit(limit_bytes);
    }
  }
  if (requested.limit_bytes != 0) {
    options_.limit_bytes = requested.limit_bytes;
    for (const auto& pool : {spill_pool_, pinned_pool_}) {
      if (pool != nullptr) {
        pool->set_limit(requested.limit_bytes);
      }
    }
  }
}

} // namespace torch_lms
