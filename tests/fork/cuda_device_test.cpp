// The CUDA device behind the environment. Needs a GPU, libc10 and libc10_cuda, and nothing else of
// PyTorch.

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "c10_harness.h"

#include <c10/core/impl/Error.h>
#include <c10/core/impl/SwapEnvironment.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

#ifdef FAKE_CUDA // whose memory is slow
constexpr size_t kBytes = size_t{4} << 20;
#else
constexpr size_t kBytes = size_t{64} << 20;
#endif
constexpr size_t kSmall = size_t{1} << 20;

#define CUDA(call) REQUIRE((call) == cudaSuccess)

c10::impl::SwapEnvironment& environment() {
  return c10::impl::SwapEnvironment::get();
}

struct OpenEnvironment {
  OpenEnvironment() {
    if (c10::cuda::device_count() == 0) {
      SKIP("needs a GPU");
    }
    static const bool initialized = [] {
      allocator::init(c10::cuda::device_count());
      return true;
    }();
    static_cast<void>(initialized);
    environment().open(0);
  }
  ~OpenEnvironment() {
    environment().close();
  }
};

c10::Storage make_storage(size_t nbytes = kBytes) {
  return c10::Storage(
      c10::Storage::use_byte_size_t(), nbytes, allocator::get(), /*resizable=*/true);
}

c10::StorageImpl& impl_of(const c10::Storage& storage) {
  return *storage.unsafeGetStorageImpl();
}

cudaStream_t current() {
  return c10::cuda::getCurrentCUDAStream().stream();
}

/// Reads a storage back by way of the current stream: whether all bytes are `value`.
bool all_bytes_are(const c10::Storage& storage, unsigned char value) {
  std::vector<unsigned char> bytes(storage.nbytes());
  cudaMemcpyAsync(bytes.data(), storage.data(), bytes.size(), cudaMemcpyDeviceToHost, current());
  if (cudaStreamSynchronize(current()) != cudaSuccess) {
    return false;
  }
  for (const unsigned char byte : bytes) {
    if (byte != value) {
      return false;
    }
  }
  return true;
}

size_t allocated_bytes() {
  return static_cast<size_t>(allocator::getDeviceStats(0).allocated_bytes[0].current);
}

/// Occupies a stream for some milliseconds.
void keep_busy(cudaStream_t stream, const c10::Storage& scratch) {
  for (int i = 0; i < 400; ++i) {
    cudaMemsetAsync(scratch.data(), i, scratch.nbytes(), stream);
  }
}

TEST(device_memory_pages_out_and_back) {
  OpenEnvironment open;
  const size_t before = allocated_bytes();
  const c10::Storage storage = make_storage();
  CUDA(cudaMemsetAsync(storage.data(), 17, kBytes, current()));
  CHECK(environment().pageout(impl_of(storage)));
  environment().wait_pageouts();
  CHECK(environment().state(impl_of(storage)) == torch_lms::EntityState::kPagedOut);
  CHECK_EQ(allocated_bytes(), before);
  CHECK(storage.device().is_cuda());
  CHECK(all_bytes_are(storage, 17));
  CHECK_EQ(allocated_bytes(), before + kBytes);
}

TEST(a_pageout_is_ordered_after_every_stream_that_has_work) {
  OpenEnvironment open;
  const c10::Storage scratch = make_storage();
  for (int round = 0; round < 3; ++round) {
    const c10::Storage storage = make_storage();
    CUDA(cudaMemsetAsync(storage.data(), 1, kBytes, current()));
    CUDA(cudaStreamSynchronize(current()));
    // Written late, by a stream that is not current when the page-out is asked for.
    const auto side = c10::cuda::getStreamFromPool(round % 2 == 1);
    keep_busy(side.stream(), scratch);
    CUDA(cudaMemsetAsync(storage.data(), 50 + round, kBytes, side.stream()));
    CHECK(environment().pageout(impl_of(storage)));
    environment().wait_pageouts();
    CHECK(all_bytes_are(storage, static_cast<unsigned char>(50 + round)));
  }
}

/// Occupies a stream until it is opened.
class StreamGate {
 public:
  void hold(cudaStream_t stream) {
    const auto wait = [](void* self) {
      while (!static_cast<StreamGate*>(self)->open_) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    };
    CUDA(cudaLaunchHostFunc(stream, wait, this));
  }
  void open() {
    open_ = true;
  }
  ~StreamGate() {
    open();
    cudaDeviceSynchronize();
  }

 private:
  std::atomic<bool> open_{false};
};

// There are 64 streams to be handed out, and a test leaves those noted that it has used.
constexpr int kStreamsEach = 20;

/// Whether a page-out stays under way for some time.
bool waits(const c10::Storage& storage) {
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  return environment().state(impl_of(storage)) == torch_lms::EntityState::kPagingOut;
}

TEST(a_pageout_waits_for_streams_that_nobody_has_noted) {
  OpenEnvironment open;
  const c10::Storage before = make_storage(kSmall);
  const c10::Storage storage = make_storage(kSmall);
  const c10::Storage after = make_storage(kSmall);
  for (int round = 0; round < kStreamsEach; ++round) {
    CUDA(cudaMemsetAsync(storage.data(), 1, kSmall, current()));
    CUDA(cudaMemsetAsync(after.data(), 1, kSmall, current()));
    CUDA(cudaStreamSynchronize(current()));
    environment().pageout(impl_of(before));
    environment().wait_pageouts(); // the worker has asked the streams once
    StreamGate gate;
    const auto side_stream = c10::cuda::getStreamFromPool(round % 2 == 1);
    const cudaStream_t side = side_stream.stream();
    gate.hold(side);
    CUDA(cudaMemsetAsync(storage.data(), 2 + round, kSmall, side));
    CHECK(environment().pageout(impl_of(storage)));
    // By now the worker may have asked the stream, and it may not; the guard has it noted.
    CUDA(cudaMemsetAsync(after.data(), 2 + round, kSmall, side));
    c10::cuda::OptionalCUDAStreamGuard guard;
    if (round % 4 < 2) {
      guard.reset_stream(side_stream);
    }
    CHECK(environment().pageout(impl_of(after)));
    guard.reset();
    if (round % 10 == 0) {
      CHECK(waits(storage));
    }
    gate.open();
    environment().wait_pageouts();
    CHECK(all_bytes_are(storage, static_cast<unsigned char>(2 + round)));
    CHECK(all_bytes_are(after, static_cast<unsigned char>(2 + round)));
  }
}

TEST(a_capture_on_a_stream_that_nobody_has_noted_keeps_storages_where_they_are) {
  OpenEnvironment open;
  for (int round = 0; round < kStreamsEach; ++round) {
    const c10::Storage storage = make_storage(kSmall);
    CUDA(cudaMemsetAsync(storage.data(), 7, kSmall, current()));
    const cudaStream_t side = c10::cuda::getStreamFromPool(round % 2 == 1).stream();
    CUDA(cudaStreamBeginCapture(side, cudaStreamCaptureModeRelaxed));
    // Refused at once where the stream has been noted, otherwise by the worker.
    const auto page_out = [&] {
      environment().pageout(impl_of(storage));
      environment().wait_pageouts();
    };
    CHECK_THROWS(page_out(), torch_lms::PageoutRefused, "capture");
    CHECK(environment().state(impl_of(storage)) == torch_lms::EntityState::kResident);
    cudaGraph_t graph = nullptr;
    CUDA(cudaStreamEndCapture(side, &graph));
    CUDA(cudaGraphDestroy(graph));
    CHECK(all_bytes_are(storage, 7));
    CHECK(environment().pageout(impl_of(storage)));
    environment().wait_pageouts();
    CHECK(all_bytes_are(storage, 7));
  }
}

TEST(a_pageout_waits_for_each_stream_of_each_thread) {
  OpenEnvironment open;
  constexpr int kThreads = 4;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      const c10::Storage scratch = make_storage(kSmall);
      for (int round = 0; round < 40; ++round) {
        const c10::Storage storage = make_storage(kSmall);
        const int value = 1 + (thread * 40 + round) % 255;
        const cudaStream_t side = c10::cuda::getStreamFromPool(round % 2 == 1).stream();
        cudaStreamSynchronize(current());
        for (int i = 0; i < 4; ++i) {
          cudaMemsetAsync(scratch.data(), i, kSmall, side);
        }
        cudaMemsetAsync(storage.data(), value, kSmall, side);
        environment().pageout(impl_of(storage));
        environment().wait_pending_pageouts();
        wrong += all_bytes_are(storage, static_cast<unsigned char>(value)) ? 0 : 1;
        cudaStreamSynchronize(side); // before its memory is another's
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK_EQ(wrong.load(), 0);
}

TEST(a_pagein_is_seen_by_the_stream_that_accesses) {
  OpenEnvironment open;
  for (int round = 0; round < 8; ++round) {
    const c10::Storage storage = make_storage();
    CUDA(cudaMemsetAsync(storage.data(), 60 + round, kBytes, current()));
    environment().pageout(impl_of(storage));
    environment().wait_pageouts();
    if (round % 2 == 1) {
      environment().prefetch(impl_of(storage));
      environment().prefetch_all();
    }
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    CHECK(all_bytes_are(storage, static_cast<unsigned char>(60 + round)));
  }
}

TEST(a_cancelled_pageout_leaves_what_is_written_next_alone) {
  OpenEnvironment open;
  for (int round = 0; round < 20; ++round) {
    const c10::Storage storage = make_storage();
    CUDA(cudaMemsetAsync(storage.data(), 1, kBytes, current()));
    environment().pageout(impl_of(storage));
    CUDA(cudaMemsetAsync(storage.data(), 2, kBytes, current())); // the access calls it off
    CHECK(all_bytes_are(storage, 2));
  }
  environment().wait_pageouts();
}

TEST(no_room_raises_at_the_access_and_loses_nothing) {
  OpenEnvironment open;
  const c10::Storage storage = make_storage();
  CUDA(cudaMemsetAsync(storage.data(), 9, kBytes, current()));
  environment().pageout(impl_of(storage));
  environment().wait_pageouts();
  allocator::emptyCache();
  allocator::setMemoryFraction(1e-6, 0);
  CHECK_THROWS(storage.data(), c10::Error, "out of memory");
  environment().prefetch(impl_of(storage));
  environment().prefetch_all();
  environment().prefetch_init(); // a prefetch without room is no error
  allocator::setMemoryFraction(1.0, 0);
  CHECK(all_bytes_are(storage, 9));
}

TEST(memory_that_is_not_the_caching_allocators_is_refused) {
  OpenEnvironment open;
  void* foreign = nullptr;
  CUDA(cudaMalloc(&foreign, 4096));
  {
    const c10::Storage storage(
        c10::Storage::use_byte_size_t(),
        4096,
        c10::DataPtr(foreign, c10::Device(c10::kCUDA, 0)),
        nullptr,
        false);
    CHECK_THROWS(
        environment().pageout(impl_of(storage)),
        torch_lms::PageoutRefused,
        "does not belong to PyTorch's allocator");
  }
  CUDA(cudaFree(foreign));
}

TEST(nothing_moves_during_a_capture) {
  OpenEnvironment open;
  const c10::Storage resident = make_storage();
  const c10::Storage away = make_storage();
  CUDA(cudaMemsetAsync(away.data(), 5, kBytes, current()));
  environment().pageout(impl_of(away));
  environment().wait_pageouts();
  {
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    CUDA(cudaStreamBeginCapture(current(), cudaStreamCaptureModeGlobal));
    CHECK_THROWS(environment().pageout(impl_of(resident)), torch_lms::PageoutRefused, "capture");
    CHECK_THROWS(away.data(), torch_lms::PageoutRefused, "capture");
    CHECK(resident.data() != nullptr);
    cudaGraph_t graph = nullptr;
    CUDA(cudaStreamEndCapture(current(), &graph));
    CUDA(cudaGraphDestroy(graph));
  }
  CHECK(all_bytes_are(away, 5));
}

TEST(many_storages_go_round_under_pressure) {
  OpenEnvironment open;
  std::vector<c10::Storage> storages;
  for (int i = 0; i < 16; ++i) {
    storages.push_back(make_storage(kBytes / 4));
    CUDA(cudaMemsetAsync(storages.back().data(), i, kBytes / 4, current()));
  }
  for (int round = 0; round < 5; ++round) {
    for (const auto& storage : storages) {
      environment().pageout(impl_of(storage));
    }
    environment().wait_pageouts();
    environment().prefetch_init();
    for (size_t i = storages.size(); i-- > 0;) {
      environment().prefetch(impl_of(storages[i]));
    }
    environment().prefetch_all();
    for (size_t i = storages.size(); i-- > 0;) {
      CHECK(all_bytes_are(storages[i], static_cast<unsigned char>(i)));
    }
  }
}

} // namespace
