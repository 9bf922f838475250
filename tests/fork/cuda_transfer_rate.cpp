// How fast storages page out and in, beside plain copies of the same bytes between the device and
// pinned memory, in turns. Needs a GPU, libc10 and libc10_cuda, and nothing else of PyTorch.
//
//   cuda_transfer_rate BYTES COUNT ROUNDS    COUNT storages of BYTES each; a line a round:
//                                            seconds of plain out, page-out, plain in, page-in;
//                                            of these page-outs' requests, that is what they take
//                                            of the calling thread; of the requests for as many
//                                            storages that have never been paged out

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include <c10/core/Storage.h>
#include <c10/core/impl/SwapEnvironment.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

void check(cudaError_t error) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "expected CUDA to work, found: %s\n", cudaGetErrorString(error));
    std::exit(1);
  }
}

using Storages = std::vector<c10::Storage>;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Everything on the device is over before and after.
double seconds(const std::function<void()>& action) {
  check(cudaDeviceSynchronize());
  const auto start = std::chrono::steady_clock::now();
  action();
  check(cudaDeviceSynchronize());
  return seconds_since(start);
}

Storages make_storages(size_t nbytes, size_t count) {
  Storages storages;
  for (size_t i = 0; i < count; ++i) {
    storages.emplace_back(
        c10::Storage::use_byte_size_t(), nbytes, allocator::get(), /*resizable=*/true);
  }
  return storages;
}

class Rates {
 public:
  Rates(size_t nbytes, size_t count) : nbytes_(nbytes), storages_(make_storages(nbytes, count)) {
    check(cudaMalloc(&device_, nbytes * count));
    check(cudaHostAlloc(&host_, nbytes * count, cudaHostAllocDefault));
  }

  double copy(cudaMemcpyKind kind) {
    return seconds([&] {
      for (size_t i = 0; i < storages_.size(); ++i) {
        char* device = static_cast<char*>(device_) + i * nbytes_;
        char* host = static_cast<char*>(host_) + i * nbytes_;
        const bool out = kind == cudaMemcpyDeviceToHost;
        check(cudaMemcpyAsync(out ? host : device, out ? device : host, nbytes_, kind, stream_));
      }
    });
  }

  double page_out(double* requests) {
    return seconds([&] {
      *requests = request(storages_);
      environment_.wait_pageouts();
    });
  }

  double request_first_time() {
    const Storages storages = make_storages(nbytes_, storages_.size());
    check(cudaDeviceSynchronize());
    const double requests = request(storages);
    environment_.wait_pageouts();
    return requests;
  }

  double page_in() {
    environment_.prefetch_init();
    for (const c10::Storage& storage : storages_) {
      environment_.prefetch(*storage.unsafeGetStorageImpl());
    }
    return seconds([&] {
      environment_.prefetch_all();
      environment_.wait_pending_pageins();
    });
  }

 private:
  double request(const Storages& storages) {
    const auto start = std::chrono::steady_clock::now();
    for (const c10::Storage& storage : storages) {
      environment_.pageout(*storage.unsafeGetStorageImpl());
    }
    return seconds_since(start);
  }

  size_t nbytes_;
  Storages storages_;
  void* device_ = nullptr;
  void* host_ = nullptr;
  cudaStream_t stream_ = c10::cuda::getStreamFromPool().stream();
  c10::impl::SwapEnvironment& environment_ = c10::impl::SwapEnvironment::get();
};

} // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: cuda_transfer_rate BYTES COUNT ROUNDS\n");
    return 2;
  }
  if (c10::cuda::device_count() == 0) {
    std::fprintf(stderr, "expected a GPU, found none; run it where there is one\n");
    return 77;
  }
  allocator::init(c10::cuda::device_count());
  c10::impl::SwapEnvironment::get().open(0);
  {
    Rates rates(std::strtoull(argv[1], nullptr, 10), std::strtoull(argv[2], nullptr, 10));
    // The first round is for the pool of pinned memory.
    for (long round = -1; round < std::atol(argv[3]); ++round) {
      const double copied_out = rates.copy(cudaMemcpyDeviceToHost);
      double requests = 0;
      const double paged_out = rates.page_out(&requests);
      const double copied_in = rates.copy(cudaMemcpyHostToDevice);
      const double paged_in = rates.page_in();
      const double first_requests = rates.request_first_time();
      if (round >= 0) {
        std::printf("%.9f %.9f %.9f %.9f ", copied_out, paged_out, copied_in, paged_in);
        std::printf("%.9f %.9f\n", requests, first_requests);
      }
    }
  }
  c10::impl::SwapEnvironment::get().close();
  return 0;
}
