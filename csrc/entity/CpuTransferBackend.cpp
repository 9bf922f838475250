#include <entity/CpuTransferBackend.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace torch_lms {
namespace {

constexpr size_t kCancelStrideBytes = size_t{1} << 20;

} // namespace

CpuTransferBackend::CpuTransferBackend(std::shared_ptr<HostPool> pool) : pool_(std::move(pool)) {}

void* CpuTransferBackend::allocate_host(size_t nbytes) {
  return pool_->allocate(nbytes);
}

void CpuTransferBackend::free_host(void* host, FencePtr) noexcept {
  pool_->free(host);
}

FencePtr CpuTransferBackend::submitted_work() {
  return nullptr;
}

FencePtr CpuTransferBackend::copy_to_host(
    void* host,
    const void* device,
    size_t nbytes,
    const FencePtr&,
    const std::atomic<bool>& cancelled) {
  auto* to = static_cast<char*>(host);
  const auto* from = static_cast<const char*>(device);
  for (size_t at = 0; at < nbytes && !cancelled.load(std::memory_order_acquire);
       at += kCancelStrideBytes) {
    std::memcpy(to + at, from + at, std::min(kCancelStrideBytes, nbytes - at));
  }
  return nullptr;
}

FencePtr CpuTransferBackend::copy_to_device(
    void* device,
    const void* host,
    size_t nbytes,
    const FencePtr&) {
  std::memcpy(device, host, nbytes);
  return nullptr;
}

bool CpuTransferBackend::copy_on_device(void* to, const void* from, size_t nbytes) {
  std::memcpy(to, from, nbytes);
  return true;
}

void CpuTransferBackend::order_after(const FencePtr&) {}

} // namespace torch_lms
