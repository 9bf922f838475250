#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <entity/EntityStorageImpl.h>
#include <entity/Error.h>
#include <entity/StorageBinding.h>

#include "harness.h"
#include "interruptions.h"

/// Where a `FakeDevice` can be interrupted.
enum class DeviceStep {
  kHold,
  kAcquire,
  kAllocate,
  kInstallHost,
  kFree,
  kKeepBlock,
  kWatch,
  kUnwatch,
  kReferenced
};

/// The memory of a device: plain memory, in blocks that are overwritten when they go.
class FakeDevice : public std::enable_shared_from_this<FakeDevice> {
 public:
  Interruptions<DeviceStep> interruptions;
  std::atomic<size_t> blocks{0};
  std::atomic<size_t> most_blocks{SIZE_MAX};
  std::atomic<size_t> kept_for_copies{0};
  std::atomic<size_t> kept_for_arrivals{0};
  std::atomic<bool> keeps_copies{false}; ///< Tells whether blocks that come in are written.
  std::atomic<bool> blocks_are_free{false}; ///< Whether nothing is at work on new blocks.

  std::shared_ptr<char> allocate(size_t nbytes) {
    interruptions.reached(DeviceStep::kAllocate);
    if (blocks.fetch_add(1) >= most_blocks) {
      blocks.fetch_sub(1);
      throw torch_lms::NoRoom("the fake device is full");
    }
    char* data = new char[nbytes + 1];
    std::memset(data, 0xCD, nbytes + 1);
    auto self = shared_from_this();
    return std::shared_ptr<char>(data, [self, nbytes](char* block) {
      self->interruptions.reached(DeviceStep::kFree);
      std::memset(block, 0xDD, nbytes + 1);
      delete[] block;
      self->blocks.fetch_sub(1);
    });
  }
};

/// The `i`-th byte of the contents that `seed` stands for.
inline char byte_of(uint64_t seed, size_t i) {
  return static_cast<char>((seed * 0x9E3779B97F4A7C15u + i * 0xD1B54A32D192ED03u) >> 37);
}

/// What a tensor library's storage is to the core: an address, and who owns it.
class FakeStorage {
 public:
  FakeStorage(std::shared_ptr<FakeDevice> device, size_t nbytes, uint64_t seed)
      : device_(std::move(device)), nbytes_(nbytes) {
    block = device_->allocate(nbytes);
    data = block.get();
    write(seed);
  }
  ~FakeStorage() {
    let_go_of_host();
  }
  FakeStorage(const FakeStorage&) = delete;
  FakeStorage& operator=(const FakeStorage&) = delete;

  void write(uint64_t seed) {
    written = true;
    for (size_t i = 0; i < nbytes_; ++i) {
      data[i] = byte_of(seed, i);
    }
  }

  bool holds(uint64_t seed) const {
    for (size_t i = 0; i < nbytes_; ++i) {
      if (data[i] != byte_of(seed, i)) {
        return false;
      }
    }
    return true;
  }

  /// As when a tensor is resized, or given other memory.
  void replace_memory(size_t nbytes, uint64_t seed) {
    auto fresh = device_->allocate(nbytes);
    data = fresh.get();
    nbytes_ = nbytes;
    std::swap(block, fresh);
    write(seed);
    let_go_of_host();
  }

  FakeDevice& device() {
    return *device_;
  }
  size_t nbytes() const {
    return nbytes_;
  }

  char* data = nullptr;
  std::shared_ptr<char> block; ///< Null while paged out.
  std::shared_ptr<torch_lms::EntityStorageImpl> mark; ///< Set while paged out.
  std::weak_ptr<torch_lms::EntityStorageImpl> entity;
  std::atomic<bool> watched{false};
  std::atomic<bool> block_watched{false}; ///< Whether `written` tells of every write.
  std::atomic<bool> written{false};

 private:
  void let_go_of_host() {
    if (mark != nullptr) {
      std::exchange(mark, nullptr)->host_copy_released();
    }
  }

  const std::shared_ptr<FakeDevice> device_;
  size_t nbytes_;
};

/// Binds an entity to a `FakeStorage`, and reports calls that the contract forbids.
class FakeBinding final : public torch_lms::StorageBinding {
 public:
  using KeepAlive = torch_lms::KeepAlive;
  using DeviceBlock = torch_lms::DeviceBlock;

  explicit FakeBinding(const std::shared_ptr<FakeStorage>& storage)
      : storage_(storage), raw_(storage.get()), device_(storage->device().shared_from_this()) {}

  KeepAlive hold() override {
    device_->interruptions.reached(DeviceStep::kHold);
    auto storage = storage_.lock();
    return storage ? std::make_shared<std::shared_ptr<FakeStorage>>(std::move(storage)) : nullptr;
  }

  KeepAlive acquire(size_t nbytes, void** device) override {
    device_->interruptions.reached(DeviceStep::kAcquire);
    KeepAlive keep = hold();
    if (keep == nullptr || raw_->nbytes() != nbytes || raw_->mark != nullptr) {
      return nullptr;
    }
    block_ = raw_->data;
    *device = raw_->data;
    return keep;
  }

  bool expired() override {
    return storage_.expired();
  }
  const void* address() override {
    return storage().data;
  }
  bool referenced() override {
    device_->interruptions.reached(DeviceStep::kReferenced);
    return storage_.use_count() > 1;
  }

  std::unique_ptr<DeviceBlock> install_host(
      void* host,
      const std::shared_ptr<torch_lms::EntityStorageImpl>& entity) override {
    device_->interruptions.reached(DeviceStep::kInstallHost);
    if (storage().data != block_ || storage().nbytes() != entity->nbytes()) {
      return nullptr;
    }
    auto old = std::make_unique<Block>();
    std::swap(old->data_, storage().block);
    storage().data = static_cast<char*>(host);
    storage().mark = entity;
    return old;
  }

  std::unique_ptr<DeviceBlock> allocate(size_t nbytes) override {
    auto block = std::make_unique<Block>();
    block->data_ = device_->allocate(nbytes);
    return block;
  }

  torch_lms::FencePtr block_is_free(torch_lms::TransferBackend& backend) override {
    return device_->blocks_are_free ? nullptr : StorageBinding::block_is_free(backend);
  }

  void install_device(std::unique_ptr<DeviceBlock> block) override {
    CHECK(storage().mark != nullptr);
    storage().block = std::move(static_cast<Block&>(*block).data_);
    storage().data = storage().block.get();
    storage().mark = nullptr; // the caller holds the entity
  }

  void watch() override {
    device_->interruptions.reached(DeviceStep::kWatch);
    storage().watched = true;
  }
  void unwatch() override {
    device_->interruptions.reached(DeviceStep::kUnwatch);
    storage().watched = false;
    storage().block_watched = false;
  }
  bool install_watched(std::unique_ptr<DeviceBlock> block) override {
    if (!device_->keeps_copies) {
      return StorageBinding::install_watched(std::move(block));
    }
    install_device(std::move(block));
    storage().written = false;
    storage().block_watched = true;
    return true;
  }
  bool unwritten() override {
    return storage().block_watched && !storage().written;
  }
  void keep_block_for_copy() override {
    keep_block();
    device_->kept_for_copies.fetch_add(1);
  }
  void keep_block_for_arrival() override {
    keep_block();
    device_->kept_for_arrivals.fetch_add(1);
  }

 private:
  struct Block final : DeviceBlock {
    void* data() const noexcept override {
      return data_.get();
    }
    std::shared_ptr<char> data_;
  };

  /// A device's allocator has a lock of its own, under which it may call the entity.
  void keep_block() {
    if (const auto entity = storage().entity.lock()) {
      CHECK(entity->pinned()); // or the block may go meanwhile
      entity->settled(); // never returns if the caller holds the entity's lock
    }
    device_->interruptions.reached(DeviceStep::kKeepBlock);
    std::lock_guard<std::mutex> lock(kept_mutex_);
    kept_.push_back(storage().block);
  }

  /// Somebody holds it, or the caller must not have called.
  FakeStorage& storage() {
    CHECK(!storage_.expired());
    return *raw_;
  }

  const std::weak_ptr<FakeStorage> storage_;
  FakeStorage* const raw_;
  const std::shared_ptr<FakeDevice> device_;
  const void* block_ = nullptr;
  std::mutex kept_mutex_;
  std::vector<std::shared_ptr<char>> kept_;
};

inline std::shared_ptr<torch_lms::EntityStorageImpl> make_entity(
    const std::shared_ptr<FakeStorage>& storage,
    const std::shared_ptr<torch_lms::TransferBackend>& backend,
    uint64_t first_seen) {
  auto entity = std::make_shared<torch_lms::EntityStorageImpl>(
      std::make_unique<FakeBinding>(storage), backend, storage->nbytes(), first_seen);
  storage->entity = entity;
  return entity;
}
