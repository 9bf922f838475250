#include <entity/cuda/PinnedSlabSource.h>

#include <sys/mman.h>

#include <algorithm>
#include <thread>

#include <cuda_runtime_api.h>

#include <entity/cuda/CudaScope.h>

namespace torch_lms {
namespace {

constexpr unsigned kMaxThreads = 8;

} // namespace

PinnedSlabSource::PinnedSlabSource(size_t slab_bytes)
    : slab_bytes_(slab_bytes), memory_(slab_bytes) {}

Slab PinnedSlabSource::acquire(size_t nbytes) {
  Slab slab = memory_.acquire(nbytes);
  madvise(slab.data, slab.nbytes, MADV_HUGEPAGE); // a hint; small pages do as well
  const unsigned threads = std::min(kMaxThreads, std::max(1U, std::thread::hardware_concurrency()));
  touch_pages_parallel(slab.data, slab.nbytes, static_cast<int>(threads));
  try {
    check_cuda(
        cudaHostRegister(slab.data, slab.nbytes, cudaHostRegisterPortable | cudaHostRegisterMapped),
        "to register host memory (lower host_limit if the system cannot lock as much)");
    void* on_device = nullptr;
    check_cuda(
        cudaHostGetDevicePointer(&on_device, slab.data, 0),
        "to address registered host memory from the device");
    if (on_device != slab.data) {
      cudaHostUnregister(slab.data);
      check_cuda(cudaErrorNotSupported, "to address host memory by the same pointer everywhere");
    }
  } catch (...) {
    memory_.release(slab);
    throw;
  }
  return slab;
}

void PinnedSlabSource::release(Slab& slab) noexcept {
  cudaHostUnregister(slab.data);
  memory_.release(slab);
}

} // namespace torch_lms
