// Threads that page out, prefetch, use and free the same storages at once, in main memory.

#include <entity/CpuTransferBackend.h>
#include <entity/CudaEntityTransferQueue.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include <entity/HostPool.h>
#include <entity/SlabSource.h>

#include "fake_binding.h"
#include "harness.h"

namespace torch_lms {
namespace {

constexpr size_t kNbytes = 8192;
constexpr size_t kMiB = size_t{1} << 20;

std::shared_ptr<HostPool> make_pool() {
  return std::make_shared<HostPool>(std::make_unique<AnonymousSlabSource>(kMiB), HostPoolOptions());
}

/// A storage, its entity and what it holds.
struct Tensor {
  Tensor(
      const std::shared_ptr<FakeDevice>& device,
      const std::shared_ptr<TransferBackend>& backend,
      uint64_t contents)
      : seed(contents),
        storage(std::make_shared<FakeStorage>(device, kNbytes, contents)),
        entity(make_entity(storage, backend, 0)) {}

  std::mutex mutex; ///< Guards the contents: the program's own order of its ops.
  uint64_t seed;
  std::mutex request_mutex;
  const std::shared_ptr<FakeStorage> storage;
  const std::shared_ptr<EntityStorageImpl> entity;
};

/// What the threads share. Everything moves by way of two queues.
class Stress {
 public:
  explicit Stress(bool requests_in_turn) : requests_in_turn_(requests_in_turn) {
    for (size_t i = 0; i < slots_.size(); ++i) {
      slots_[i] = make_tensor(i);
    }
    out_.start_actions();
    in_.start_actions();
  }

  void run() {
    std::vector<std::thread> threads;
    for (unsigned seed = 1; seed <= 4; ++seed) {
      threads.emplace_back([this, seed] { work(seed); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    out_.wait_and_stop_actions();
    in_.wait_and_stop_actions();
    commit();
    CHECK_EQ(out_.pending_bytes(), 0);
    CHECK_EQ(in_.pending_bytes(), 0);
    for (auto& slot : slots_) {
      use(*slot, 0);
      slot = nullptr;
    }
    CHECK_EQ(pool_->stats().used_bytes, 0);
    CHECK_EQ(device_->blocks.load(), 0);
    CHECK(pageouts_ > 0); // or nothing has been tested
    CHECK(pageins_ > 0);
  }

 private:
  std::shared_ptr<Tensor> make_tensor(uint64_t seed) {
    return std::make_shared<Tensor>(device_, backend_, seed);
  }

  void work(unsigned seed) {
    std::mt19937 random(seed);
    for (int i = 0; i < 1500; ++i) {
      auto& slot = slots_[random() % slots_.size()];
      std::shared_ptr<Tensor> tensor;
      {
        std::lock_guard<std::mutex> lock(slots_mutex_);
        tensor = slot;
      }
      switch (random() % 16) {
        case 0: {
          auto fresh = make_tensor(random());
          std::lock_guard<std::mutex> lock(slots_mutex_);
          slot.swap(fresh);
          tensor = nullptr;
          break;
        }
        case 1:
        case 2:
        case 3:
          use(*tensor, random());
          break;
        case 4:
          commit();
          break;
        case 5: {
          AccessResult result;
          tensor->entity->touch(&result);
          break;
        }
        default:
          random() % 2 == 0 ? page_out(*tensor) : page_in(*tensor);
      }
      if (out_.has_finished()) {
        commit();
      }
    }
  }

  void page_out(Tensor& tensor) {
    std::unique_lock<std::mutex> lock(tensor.request_mutex, std::defer_lock);
    if (requests_in_turn_) {
      lock.lock();
    }
    if (tensor.entity->request_pageout()) {
      out_.enqueue(tensor.entity);
    }
  }

  void page_in(Tensor& tensor) {
    if (tensor.entity->request_pagein()) {
      in_.enqueue(tensor.entity);
    }
  }

  /// An op: it pins its input, brings it, reads it and, but for seed 0, writes it.
  void use(Tensor& tensor, uint64_t seed) {
    tensor.entity->pin();
    pageins_ += tensor.entity->access() >= AccessResult::kPrefetched ? 1 : 0;
    {
      std::lock_guard<std::mutex> lock(tensor.mutex);
      CHECK(tensor.storage->holds(tensor.seed));
      if (seed != 0) {
        tensor.seed = seed;
        tensor.storage->write(seed);
      }
    }
    tensor.entity->unpin();
  }

  void commit() {
    std::vector<FinishedTransfer> in_use;
    std::vector<FinishedTransfer> finished = out_.take_finished();
    for (FinishedTransfer& transfer : finished) {
      std::unique_ptr<DeviceBlock> garbage;
      const auto result = transfer.out == nullptr
                              ? CommitResult::kDropped
                              : transfer.entity->commit_pageout(transfer.out, &garbage);
      if (result == CommitResult::kInUse) {
        in_use.push_back(std::move(transfer));
        continue;
      }
      pageouts_ += result == CommitResult::kCommitted ? 1 : 0;
      out_.retire(kNbytes);
    }
    out_.return_finished(std::move(in_use));
    for (const FinishedTransfer& transfer : in_.take_finished()) {
      if (transfer.in != nullptr) {
        transfer.entity->commit_pagein(transfer.in);
      }
      in_.retire(kNbytes);
    }
  }

  const bool requests_in_turn_;
  const std::shared_ptr<HostPool> pool_ = make_pool();
  const std::shared_ptr<TransferBackend> backend_ = std::make_shared<CpuTransferBackend>(pool_);
  const std::shared_ptr<FakeDevice> device_ = std::make_shared<FakeDevice>();
  std::mutex slots_mutex_;
  std::array<std::shared_ptr<Tensor>, 6> slots_;
  CudaEntityTransferQueue out_{TransferDirection::kOut, 2 * kNbytes};
  CudaEntityTransferQueue in_{TransferDirection::kIn, 2 * kNbytes};
  std::atomic<int> pageouts_{0};
  std::atomic<int> pageins_{0};
};

TEST(threads_that_page_out_prefetch_use_and_free_at_once_see_their_bytes) {
  Stress(true).run();
}

TEST(threads_that_ask_for_the_same_pageout_at_once_see_their_bytes) {
  Stress(false).run();
}

// --- the backend of main memory ------------------------------------------------------------

TEST(main_memory_is_copied_whole_and_at_once) {
  const auto pool = make_pool();
  CpuTransferBackend backend(pool);
  CHECK(!backend.copies_asynchronously());
  CHECK(backend.submitted_work() == nullptr);
  for (size_t nbytes : {size_t{0}, size_t{1}, kMiB - 1, kMiB, kMiB + 1, 3 * kMiB + 5}) {
    std::vector<char> from(nbytes + 1, 'f');
    std::vector<char> to(nbytes + 1, 't');
    for (size_t i = 0; i < nbytes; i += 511) {
      from[i] = byte_of(nbytes, i);
    }
    void* host = backend.allocate_host(nbytes);
    const std::atomic<bool> cancelled{false};
    CHECK(backend.copy_to_host(host, from.data(), nbytes, nullptr, cancelled) == nullptr);
    CHECK(backend.copy_to_device(to.data(), host, nbytes, nullptr) == nullptr);
    CHECK_EQ(std::memcmp(to.data(), from.data(), nbytes), 0);
    CHECK_EQ(to[nbytes], 't');
    backend.free_host(host, nullptr);
  }
  backend.free_host(nullptr, nullptr);
  CHECK_EQ(pool->stats().used_bytes, 0);
}

TEST(a_copy_to_the_host_that_is_called_off_copies_nothing_more) {
  const auto pool = make_pool();
  CpuTransferBackend backend(pool);
  std::vector<char> from(3 * kMiB, 'f');
  std::vector<char> host(3 * kMiB, 'h');
  const std::atomic<bool> cancelled{true};
  backend.copy_to_host(host.data(), from.data(), host.size(), nullptr, cancelled);
  CHECK(std::vector<char>(3 * kMiB, 'h') == host);
}

} // namespace
} // namespace torch_lms
