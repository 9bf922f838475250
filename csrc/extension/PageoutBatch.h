#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <c10/core/Storage.h>
#include <entity/EntityStorageImpl.h>

#include <extension/EntityTable.h>

namespace torch_lms {

/// Page-outs that are asked for by hand in one call. They share a fence, since nothing is
/// submitted between them, and go to the queue together.
///
/// Not thread-safe: an object of one call. From its construction on, ops that begin look
/// for what is on its way out.
class PageoutBatch {
 public:
  PageoutBatch();
  ~PageoutBatch();
  PageoutBatch(const PageoutBatch&) = delete;
  PageoutBatch& operator=(const PageoutBatch&) = delete;

  /// No effect where there is nothing to do (already paged out, or on its way; zero
  /// bytes). Throws PageoutRefused; those added before stay.
  void add(const c10::Storage& storage);

  /// Enqueues what has been added since the last call. Throws PageoutRefused for one that
  /// an op has begun to use meanwhile; the others are enqueued.
  void submit();

  /// How many page-outs have been enqueued.
  size_t enqueued() const noexcept {
    return enqueued_;
  }

 private:
  struct Request {
    c10::Storage storage;
    EntityPtr entity;
    std::shared_ptr<PageoutTransfer> transfer;
  };

  void take_fences();
  void abandon() noexcept;

  std::vector<Request> requests_;
  size_t enqueued_ = 0;
};

} // namespace torch_lms
