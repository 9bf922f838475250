#include <extension/memory/CpuDevice.h>

#include <algorithm>
#include <utility>

#include <c10/core/CPUAllocator.h>
#include <entity/CpuTransferBackend.h>
#include <entity/HostMemory.h>

namespace torch_lms {

CpuDevice::CpuDevice(std::shared_ptr<HostPool> pool)
    : pool_(std::move(pool)),
      backend_(std::make_shared<CpuTransferBackend>(pool_)),
      allocator_(*new CountingCpuAllocator(*this)) {}

bool CpuDevice::owns(const c10::DataPtr& data) const {
  const c10::DeleterFnPtr deleter = data.get_deleter();
  return data.get() != nullptr && data.get() == data.get_context() &&
         (deleter == allocator_.raw_deleter() ||
          deleter == c10::GetDefaultCPUAllocator()->raw_deleter());
}

c10::DataPtr CpuDevice::allocate(size_t nbytes, int64_t) {
  return c10::GetCPUAllocator()->allocate(nbytes);
}

DeviceUse CpuDevice::use() const {
  const size_t allocated_bytes = allocator_.allocated_bytes();
  return {allocated_bytes, allocator_.peak_bytes(), allocated_bytes};
}

void CpuDevice::reset_peak() {
  allocator_.reset_peak();
}

size_t CpuDevice::memory_bytes() {
  return std::min(physical_bytes(), cgroup_limit_bytes());
}

void CpuDevice::limit(size_t limit_bytes, Room& room) {
  grant(0, 0);
  allocator_.install();
  allocator_.ask(&room);
  limit_bytes_.store(limit_bytes);
}

void CpuDevice::unlimit() {
  limit_bytes_.store(0);
  allocator_.ask(nullptr);
  allocator_.uninstall();
}

} // namespace torch_lms
