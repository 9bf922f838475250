// The backend of CUDA devices on a fake runtime: what goes back must go without memory. Where
// CUDA's headers are, it is part of this program.

#include "harness.h"

#if __has_include(<cuda_runtime_api.h>)

#include <entity/SlabSource.h>
#include <entity/cuda/CudaFence.h>
#include <entity/cuda/CudaTransferBackend.h>
#include <chrono>
#include <future>
#include <thread>
#include <vector>

#include "../fork/fake_cuda.cpp"
#include "failing_new.h"

#include <entity/cuda/CudaFence.cpp>
#include <entity/cuda/CudaScope.cpp>
#include <entity/cuda/CudaTransferBackend.cpp>

namespace torch_lms {
namespace {

constexpr size_t kBytes = 4096;

/// A stream that is busy until it is let go on.
class BusyStream {
 public:
  BusyStream() {
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaLaunchHostFunc(
        stream,
        [](void* open) { static_cast<std::promise<void>*>(open)->get_future().wait(); },
        &open_);
  }
  ~BusyStream() {
    cudaStreamSynchronize(stream);
  }
  BusyStream(const BusyStream&) = delete;
  BusyStream& operator=(const BusyStream&) = delete;

  void go_on() {
    open_.set_value();
  }

  cudaStream_t stream = nullptr;

 private:
  std::promise<void> open_;
};

struct Rig {
  std::shared_ptr<HostPool> pool = std::make_shared<HostPool>(
      std::make_unique<AnonymousSlabSource>(size_t{2} << 20),
      HostPoolOptions());
  CudaTransferBackend backend{0, pool, [] { return cudaStream_t{}; }};

  size_t used_bytes() const {
    return pool->stats().used_bytes;
  }
};

TEST(host_memory_of_a_copy_that_is_over_later_goes_back_later) {
  Rig rig;
  BusyStream busy;
  void* host = rig.backend.allocate_host(kBytes);
  rig.backend.free_host(host, rig.backend.submitted_to(busy.stream));
  CHECK_EQ(rig.used_bytes(), kBytes);
  busy.go_on();
  cudaStreamSynchronize(busy.stream);
  rig.backend.free_host(rig.backend.allocate_host(kBytes), nullptr);
  CHECK_EQ(rig.used_bytes(), 0);
}

TEST(host_memory_goes_back_where_there_is_no_memory_to_remember_it) {
  Rig rig;
  BusyStream busy;
  void* host = rig.backend.allocate_host(kBytes);
  FencePtr after = rig.backend.submitted_to(busy.stream);
  std::thread device([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20)); // who frees waits meanwhile
    busy.go_on();
  });
  {
    const FailingNew failing(0);
    rig.backend.free_host(host, std::move(after));
    CHECK(failing.failed());
  }
  CHECK_EQ(rig.used_bytes(), 0);
  device.join();
}

TEST(fences_end_without_memory) {
  Rig rig;
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  for (int round = 0; round < 2; ++round) {
    std::vector<FencePtr> fences;
    for (int i = 0; i < 100; ++i) {
      fences.push_back(rig.backend.submitted_to(stream));
    }
    bool asked = false;
    {
      const FailingNew failing(0);
      fences.clear();
      asked = failing.failed();
    }
    CHECK(!asked);
  }
}

} // namespace
} // namespace torch_lms

#else

TEST(the_backend_of_cuda_devices) {
  SKIP("there are no headers of CUDA here: set CUDA_HOME");
}

#endif
