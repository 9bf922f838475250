#include <entity/cuda/CudaTransferBackend.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <mutex>
#include <string>
#include <utility>

#include <entity/Error.h>

namespace torch_lms {
namespace {

constexpr size_t kSharedBytes = size_t{8} << 20;

// Note [While a graph is captured]
// An op of a capture may find its input paged out. Its page-in must not become part of the
// graph, and must not break the capture:
// - A capture forbids its own thread many calls (queries of events among them) unless the
//   thread says that it knows better: `RelaxedCapture`.
// - An event that is recorded on a stream under capture is a node of the graph, and would
//   draw the copy's stream into it. Such a stream is left out: nothing leaves during a
//   capture, and what a page-in overwrites is a block that the allocator found free of the
//   stream's earlier work.
// - A stream under capture cannot wait for an event from outside: the thread waits instead.

/// Lets the calling thread use streams that are not being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept {
    cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  ~RelaxedCapture() {
    cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// Makes `device` current for the calling thread while in scope, whatever it captures.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    check_cuda(cudaGetDevice(&previous_), "to read the current device");
    if (previous_ != device) {
      check_cuda(cudaSetDevice(device), "to select the entity's device");
      changed_ = true;
    }
  }
  ~DeviceScope() {
    if (changed_) {
      cudaSetDevice(previous_);
    }
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  const RelaxedCapture relaxed_;
  int previous_ = 0;
  bool changed_ = false;
};

/// Events are reused: creating one costs more than recording it.
class EventPool {
 public:
  static EventPool& get(int device) {
    static auto* pools = new std::array<EventPool, 64>();
    return (*pools)[static_cast<size_t>(device) % pools->size()];
  }
  cudaEvent_t take() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        cudaEvent_t event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    cudaEvent_t event = nullptr;
    check_cuda(
        cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync),
        "to create an event");
    return event;
  }
  void give(cudaEvent_t event) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(event);
  }

 private:
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

/// Note [Small copies share a fence]
/// An event between two copies holds the second up for some microseconds, which is a sixth
/// of the time that a copy of 1 MiB takes. So copies on one stream share a fence until they
/// are `kSharedBytes`, or until somebody asks for it: its event is recorded then, behind
/// all that have been submitted.

/// Events on the streams that have been recorded, or copies on the stream `open_on`.
/// `record` is for the thread that makes the fence; everything else is thread-safe.
class CudaFence final : public Fence {
 public:
  explicit CudaFence(int device, cudaStream_t open_on = nullptr)
      : device_(device), open_on_(open_on), open_(open_on != nullptr) {
    events_.reserve(1);
  }
  ~CudaFence() override {
    for (cudaEvent_t event : events_) {
      EventPool::get(device_).give(event);
    }
  }
  void record(cudaStream_t stream) {
    events_.reserve(events_.size() + 1);
    cudaEvent_t event = EventPool::get(device_).take();
    events_.push_back(event);
    check_cuda(cudaEventRecord(event, stream), "to record an event");
  }

  /// Calls `submit`, whose copy this fence covers then. False if it is closed by now.
  template <typename Submit>
  bool cover(const Submit& submit) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!open_) {
      return false;
    }
    submit();
    return true;
  }

  /// Nothing more is covered. Thread-safe.
  void close() {
    if (!open_.load(std::memory_order_acquire)) {
      return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (open_) {
      DeviceScope scope(device_);
      events_.clear();
      record(open_on_);
      open_.store(false, std::memory_order_release);
    }
  }

  bool done() noexcept override {
    const RelaxedCapture relaxed;
    try {
      close();
    } catch (const std::exception&) {
      return false; // wait() reports it.
    }
    for (cudaEvent_t event : events_) {
      // An error is not "done": wait() reports it.
      if (cudaEventQuery(event) != cudaSuccess) {
        cudaGetLastError(); // cudaErrorNotReady must not stick
        return false;
      }
    }
    return true;
  }
  void wait() override {
    if (done()) {
      return;
    }
    close();
    const RelaxedCapture relaxed;
    for (cudaEvent_t event : events_) {
      check_cuda(cudaEventSynchronize(event), "to wait for a transfer");
    }
  }
  void order(cudaStream_t stream) {
    close();
    for (cudaEvent_t event : events_) {
      check_cuda(cudaStreamWaitEvent(stream, event, 0), "to order a stream after an event");
    }
  }

 private:
  const int device_;
  const cudaStream_t open_on_;
  std::mutex mutex_; // held while a copy is covered
  std::atomic<bool> open_;
  std::vector<cudaEvent_t> events_;
};

void order(cudaStream_t stream, const FencePtr& after) {
  if (after != nullptr) {
    static_cast<CudaFence&>(*after).order(stream);
  }
}

} // namespace

bool is_capturing(cudaStream_t stream) noexcept {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    cudaGetLastError();
    return true; // The legacy stream, while another stream that it waits for is captured.
  }
  return status != cudaStreamCaptureStatusNone;
}

void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    cudaGetLastError(); // clear it, unless it is sticky
    throw TransferFailed(
        std::string("expected CUDA ") + what + ", found error " + cudaGetErrorName(status) + " (" +
        cudaGetErrorString(status) + "); if the device is in a sticky error, restart the process");
  }
}

CudaTransferBackend::CudaTransferBackend(
    int device,
    std::shared_ptr<HostPool> pool,
    CurrentStream current_stream)
    : device_(device), pool_(std::move(pool)), current_stream_(std::move(current_stream)) {
  DeviceScope scope(device_);
  for (Lane* lane : {&out_, &in_}) {
    check_cuda(
        cudaStreamCreateWithFlags(&lane->stream, cudaStreamNonBlocking), "to create a stream");
  }
}

CudaTransferBackend::~CudaTransferBackend() {
  // Errors cannot be thrown here, and at process exit CUDA may be gone already.
  cudaStreamDestroy(out_.stream);
  cudaStreamDestroy(in_.stream);
}

void CudaTransferBackend::note_stream(cudaStream_t stream) {
  const size_t count = stream_count_.load(std::memory_order_acquire);
  const auto* end = streams_.data() + count;
  if (std::find(static_cast<const cudaStream_t*>(streams_.data()), end, stream) != end) {
    return;
  }
  std::lock_guard<std::mutex> lock(streams_mutex_);
  const size_t now = stream_count_.load(std::memory_order_relaxed);
  const auto begin = streams_.begin();
  if (std::find(begin, begin + static_cast<std::ptrdiff_t>(now), stream) !=
      begin + static_cast<std::ptrdiff_t>(now)) {
    return;
  }
  if (now == kMaxStreams) {
    throw TransferFailed(
        "expected at most 128 streams that use paged storages on one device, found more; reuse "
        "streams instead of creating new ones");
  }
  streams_[now] = stream;
  stream_count_.store(now + 1, std::memory_order_release);
}

std::vector<cudaStream_t> CudaTransferBackend::noted_streams() const {
  const size_t count = stream_count_.load(std::memory_order_acquire);
  return std::vector<cudaStream_t>(streams_.data(), streams_.data() + count);
}

// --- host memory ----------------------------------------------------------------

void* CudaTransferBackend::allocate_host(size_t nbytes) {
  reclaim(false);
  try {
    return pool_->allocate(nbytes);
  } catch (const HostPoolFull&) {
    reclaim(true); // copies that are under way still hold host memory
  }
  return pool_->allocate(nbytes);
}

void CudaTransferBackend::free_host(void* host, FencePtr after) noexcept {
  if (after == nullptr || after->done()) {
    pool_->free(host);
    return;
  }
  std::lock_guard<std::mutex> lock(deferred_mutex_);
  deferred_.push_back(DeferredFree{host, std::move(after)});
}

void CudaTransferBackend::reclaim(bool wait) {
  std::vector<DeferredFree> deferred;
  {
    std::lock_guard<std::mutex> lock(deferred_mutex_);
    deferred.swap(deferred_);
  }
  std::vector<DeferredFree> pending;
  std::exception_ptr failed;
  for (auto& entry : deferred) {
    try {
      if (wait && failed == nullptr) {
        entry.after->wait();
      }
    } catch (...) {
      failed = std::current_exception();
    }
    if (entry.after->done()) {
      pool_->free(entry.host);
    } else {
      pending.push_back(std::move(entry));
    }
  }
  {
    std::lock_guard<std::mutex> lock(deferred_mutex_);
    std::move(pending.begin(), pending.end(), std::back_inserter(deferred_));
  }
  if (failed != nullptr) {
    std::rethrow_exception(failed);
  }
}

// --- copies and order -------------------------------------------------------------

FencePtr CudaTransferBackend::submitted_work() {
  DeviceScope scope(device_);
  auto fence = std::make_shared<CudaFence>(device_);
  const size_t count = stream_count_.load(std::memory_order_acquire);
  for (size_t i = 0; i < count; ++i) {
    if (!is_capturing(streams_[i])) {
      fence->record(streams_[i]);
    }
  }
  return fence;
}

void CudaTransferBackend::note_busy_streams(const std::vector<cudaStream_t>& streams) {
  DeviceScope scope(device_);
  for (cudaStream_t stream : streams) {
    if (!is_capturing(stream) && cudaStreamQuery(stream) == cudaErrorNotReady) {
      note_stream(stream);
    }
  }
  cudaGetLastError(); // cudaErrorNotReady must not stick
}

FencePtr CudaTransferBackend::copy(
    Lane& lane,
    void* to,
    const void* from,
    size_t nbytes,
    cudaMemcpyKind kind,
    const FencePtr& after) {
  DeviceScope scope(device_);
  std::lock_guard<std::mutex> lock(lane.mutex);
  if (lane.after != after) {
    order(lane.stream, after);
    lane.after = after;
  }
  const auto submit = [&] {
    check_cuda(cudaMemcpyAsync(to, from, nbytes, kind, lane.stream), "to submit a copy");
  };
  auto fence = std::static_pointer_cast<CudaFence>(lane.fence);
  if (fence == nullptr || !fence->cover(submit)) {
    fence = std::make_shared<CudaFence>(device_, lane.stream);
    fence->cover(submit);
    lane.fence = fence;
    lane.nbytes = 0;
  }
  lane.nbytes += nbytes;
  if (lane.nbytes >= kSharedBytes) {
    lane.fence = nullptr;
    try {
      fence->close();
    } catch (...) {
      cudaStreamSynchronize(
          lane.stream); // Nobody could tell when the copy no longer uses the memory.
      throw;
    }
  }
  return fence;
}

FencePtr CudaTransferBackend::copy_to_host(
    void* host,
    const void* device,
    size_t nbytes,
    const FencePtr& after,
    const std::atomic<bool>&) {
  return copy(out_, host, device, nbytes, cudaMemcpyDeviceToHost, after);
}

FencePtr CudaTransferBackend::copy_to_device(
    void* device,
    const void* host,
    size_t nbytes,
    const FencePtr& after) {
  return copy(in_, device, host, nbytes, cudaMemcpyHostToDevice, after);
}

void CudaTransferBackend::order_after(const FencePtr& fence) {
  DeviceScope scope(device_);
  const cudaStream_t current = current_stream_();
  if (fence != nullptr && is_capturing(current)) {
    fence->wait(); // See Note [While a graph is captured].
    return;
  }
  order(current, fence);
}

} // namespace torch_lms
