#include <extension/CpuDevice.h>

#include <utility>

#include <c10/core/CPUAllocator.h>
#include <entity/CpuTransferBackend.h>
#include <entity/HostMemory.h>

#include <extension/CountingCpuAllocator.h>

namespace torch_lms {

CpuDevice::CpuDevice(std::shared_ptr<HostPool> pool)
    : pool_(std::move(pool)), backend_(std::make_shared<CpuTransferBackend>(pool_)) {}

bool CpuDevice::owns(const c10::DataPtr& data) const {
  const c10::DeleterFnPtr deleter = data.get_deleter();
  return data.get() != nullptr && data.get() == data.get_context() &&
         (deleter == CountingCpuAllocator::get().raw_deleter() ||
          deleter == c10::GetDefaultCPUAllocator()->raw_deleter());
}

c10::DataPtr CpuDevice::allocate(size_t nbytes, int64_t) {
  return c10::GetCPUAllocator()->allocate(nbytes);
}

size_t CpuDevice::allocated_bytes() const {
  return CountingCpuAllocator::get().allocated_bytes();
}

size_t CpuDevice::peak_allocated_bytes() const {
  return CountingCpuAllocator::get().peak_bytes();
}

void CpuDevice::reset_peak() {
  CountingCpuAllocator::get().reset_peak();
}

size_t CpuDevice::memory_bytes() {
  return std::min(physical_bytes(), cgroup_limit_bytes());
}

void CpuDevice::control(size_t limit_bytes) {
  CountingCpuAllocator::get().install();
  CountingCpuAllocator::get().set_limit(limit_bytes);
}

void CpuDevice::uncontrol() {
  CountingCpuAllocator::get().set_limit(0);
  CountingCpuAllocator::get().uninstall();
}

} // namespace torch_lms
