#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <entity/CudaEntityTransferQueue.h>

#include <extension/transfer/Entity.h>

namespace torch_lms {

/// Page-outs that are asked for together. They share a fence, since nothing is submitted between
/// them, and go to the queue together.
///
/// Not thread-safe: an object of one call. Blocks on what `Requests::evict` does.
class PageoutBatch {
 public:
  /// `by_hand`: ops that are running now may use the bytes without having pinned them. See
  /// Note [Who may still use a storage].
  explicit PageoutBatch(CudaEntityTransferQueue& out_queue, bool by_hand = false);
  ~PageoutBatch();
  PageoutBatch(const PageoutBatch&) = delete;
  PageoutBatch& operator=(const PageoutBatch&) = delete;

  /// Returns false if the entity is in use, not resident, or gone.
  bool add(const EntityPtr& entity);

  /// Enqueues what has been added since the last call, but for what an op has begun to use
  /// meanwhile. Throws what the queue throws; nothing is on its way then.
  void submit();

  /// Bytes, and how many page-outs, that have gone to the queue.
  size_t bytes() const noexcept {
    return bytes_;
  }
  size_t count() const noexcept {
    return count_;
  }

 private:
  struct Request {
    EntityPtr entity;
    std::shared_ptr<PageoutTransfer> transfer;
  };

  void take_fences();
  void abandon() noexcept;

  CudaEntityTransferQueue& out_queue_;
  const bool by_hand_;
  std::vector<Request> requests_;
  size_t bytes_ = 0;
  size_t count_ = 0;
};

} // namespace torch_lms
