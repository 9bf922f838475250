#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include <cuda_runtime_api.h>

#include <entity/HostPool.h>
#include <entity/TransferBackend.h>

namespace torch_lms {

/// Note [Streams that nobody has noted]
/// Where streams are not noted as ops run, the first page-outs have users that nobody knows.
/// To ask each stream that there may be whether it has work takes tens of microseconds: too
/// much for every request. So a request fences the streams that have been noted, and the
/// worker asks the others, once for all page-outs that have been requested by then. What it
/// finds busy it notes, and lets the stream of the copies wait for it: later work than at the
/// request may come first, which is safe, as an access of the program calls the page-out off.
/// An idle stream needs no order. Fences are numbered so that the worker can tell whether it
/// has asked since a page-out was requested.
/// A stream under capture cannot be asked what came before: the page-out is refused then.

/// Copies between one CUDA device and pinned host memory on two streams of its
/// own, one in each direction.
///
/// Ordering is by events: `submitted_work` records one on every stream that has
/// been noted, so a page-out is ordered behind all of them, not just the current
/// one. Reads host and device memory only through asynchronous copies; nothing
/// here synchronizes a device.
class CudaTransferBackend final : public TransferBackend {
 public:
  using CurrentStream = std::function<cudaStream_t()>;

  /// `current_stream` tells the stream that the calling thread submits to. `to_ask`: those
  /// of Note [Streams that nobody has noted].
  CudaTransferBackend(
      int device,
      std::shared_ptr<HostPool> pool,
      CurrentStream current_stream,
      std::vector<cudaStream_t> to_ask = {});
  ~CudaTransferBackend() override;

  /// Ops have been submitted to `stream`. Thread-safe; cheap when already known.
  void note_stream(cudaStream_t stream);

  /// Notes those that have work to do: ops may have been submitted to them before anybody
  /// noted streams. Thread-safe.
  void note_busy_streams(const std::vector<cudaStream_t>& streams);

  /// The streams that have been noted. Thread-safe.
  std::vector<cudaStream_t> noted_streams() const;

  /// Whether a graph is being captured on a stream that has been noted. Thread-safe.
  bool captures_on_noted() const noexcept;

  bool copies_asynchronously() const noexcept override {
    return true;
  }
  void* allocate_host(size_t nbytes) override;
  /// Waits for `after` where there is no memory to do so later.
  void free_host(void* host, FencePtr after) noexcept override;
  FencePtr submitted_work() override;
  /// A fence behind the work on one stream. Thread-safe.
  FencePtr submitted_to(cudaStream_t stream);
  /// Throws PageoutRefused for a capture on one of the streams `to_ask`.
  FencePtr copy_to_host(
      void* host,
      const void* device,
      size_t nbytes,
      const FencePtr& after,
      const std::atomic<bool>& cancelled) override;
  FencePtr copy_to_device(void* device, const void* host, size_t nbytes, const FencePtr& after)
      override;
  bool copy_on_device(void* to, const void* from, size_t nbytes) override;
  void order_after(const FencePtr& fence) override;

  cudaStream_t pageout_stream() const noexcept {
    return out_.stream;
  }
  cudaStream_t pagein_stream() const noexcept {
    return in_.stream;
  }

 private:
  struct DeferredFree {
    void* host;
    FencePtr after;
  };

  /// One direction. See Note [Small copies share a fence].
  struct Lane {
    cudaStream_t stream = nullptr;
    std::mutex mutex; // guards what follows
    FencePtr after; // what the latest copy waited for
    FencePtr fence; // the latest copies', if others may share it
    size_t nbytes = 0; // of these copies
  };

  void ask_streams(const FencePtr& after);
  FencePtr copy(
      Lane& lane,
      void* to,
      const void* from,
      size_t nbytes,
      cudaMemcpyKind kind,
      const FencePtr& after);
  void reclaim(bool wait);

  static constexpr size_t kMaxStreams = 1024;

  const int device_;
  const std::shared_ptr<HostPool> pool_;
  const CurrentStream current_stream_;
  Lane out_;
  Lane in_;

  mutable std::mutex streams_mutex_;
  std::array<cudaStream_t, kMaxStreams> streams_{};
  std::atomic<size_t> stream_count_{0};
  uint64_t fences_ = 0; // behind submitted work; guarded by streams_mutex_

  // See Note [Streams that nobody has noted].
  const std::vector<cudaStream_t> to_ask_;
  std::mutex asked_mutex_; // guards what follows
  uint64_t asked_fences_ = 0; // for so many the streams have been asked
  size_t fenced_streams_ = 0; // so many of streams_ are in every later fence

  std::mutex deferred_mutex_;
  std::list<DeferredFree> deferred_;
};

} // namespace torch_lms
