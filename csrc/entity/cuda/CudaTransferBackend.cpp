#include <entity/cuda/CudaTransferBackend.h>

#include <algorithm>
#include <exception>
#include <new>
#include <utility>

#include <entity/Error.h>
#include <entity/cuda/CudaFence.h>
#include <entity/cuda/CudaScope.h>

namespace torch_lms {
namespace {

constexpr size_t kSharedBytes = size_t{8} << 20;

void order(cudaStream_t stream, const FencePtr& after) {
  if (after != nullptr) {
    static_cast<CudaFence&>(*after).order(stream);
  }
}

} // namespace

CudaTransferBackend::CudaTransferBackend(
    int device,
    std::shared_ptr<HostPool> pool,
    CurrentStream current_stream,
    std::vector<cudaStream_t> to_ask)
    : device_(device),
      pool_(std::move(pool)),
      current_stream_(std::move(current_stream)),
      to_ask_(std::move(to_ask)) {
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
        "expected at most 1024 streams that use paged storages on one device, found more; reuse "
        "streams instead of creating new ones");
  }
  streams_[now] = stream;
  stream_count_.store(now + 1, std::memory_order_release);
}

std::vector<cudaStream_t> CudaTransferBackend::noted_streams() const {
  const size_t count = stream_count_.load(std::memory_order_acquire);
  return std::vector<cudaStream_t>(streams_.data(), streams_.data() + count);
}

bool CudaTransferBackend::captures_on_noted() const noexcept {
  const size_t count = stream_count_.load(std::memory_order_acquire);
  return std::any_of(streams_.data(), streams_.data() + count, &is_capturing);
}

// --- host memory ----------------------------------------------------------------

void* CudaTransferBackend::allocate_host(size_t nbytes) {
  reclaim(false);
  try {
    return pool_->allocate(nbytes);
  } catch (const Error&) {
    reclaim(true); // copies that are under way still hold host memory
  }
  return pool_->allocate(nbytes);
}

void CudaTransferBackend::free_host(void* host, FencePtr after) noexcept {
  try {
    if (after != nullptr && !after->done()) {
      std::list<DeferredFree> entry{{host, after}};
      std::lock_guard<std::mutex> lock(deferred_mutex_);
      deferred_.splice(deferred_.end(), entry);
      return;
    }
  } catch (const std::bad_alloc&) { // to remember it: it is waited for, then
    try {
      after->wait();
    } catch (const std::exception&) {
      return; // The device is in error, and may still use the memory: it stays.
    }
  }
  pool_->free(host);
}

void CudaTransferBackend::reclaim(bool wait) {
  std::list<DeferredFree> deferred; // a list: what goes back takes no memory
  {
    std::lock_guard<std::mutex> lock(deferred_mutex_);
    deferred.swap(deferred_);
  }
  std::exception_ptr failed;
  for (auto entry = deferred.begin(); entry != deferred.end();) {
    try {
      if (wait && failed == nullptr) {
        entry->after->wait();
      }
    } catch (...) {
      failed = std::current_exception();
    }
    if (entry->after->done()) {
      pool_->free(entry->host);
      entry = deferred.erase(entry);
    } else {
      ++entry;
    }
  }
  {
    std::lock_guard<std::mutex> lock(deferred_mutex_);
    deferred_.splice(deferred_.begin(), deferred);
  }
  if (failed != nullptr) {
    std::rethrow_exception(failed);
  }
}

// --- copies and order -------------------------------------------------------------

FencePtr CudaTransferBackend::submitted_work() {
  DeviceScope scope(device_);
  size_t count = 0;
  uint64_t number = 0;
  {
    std::lock_guard<std::mutex> lock(streams_mutex_);
    count = stream_count_.load(std::memory_order_relaxed);
    number = ++fences_;
  }
  auto fence = std::make_shared<CudaFence>(device_, nullptr, number);
  for (size_t i = 0; i < count; ++i) {
    if (!is_capturing(streams_[i])) {
      fence->record(streams_[i]);
    }
  }
  return fence;
}

FencePtr CudaTransferBackend::submitted_to(cudaStream_t stream) {
  DeviceScope scope(device_);
  auto fence = std::make_shared<CudaFence>(device_);
  if (!is_capturing(stream)) {
    fence->record(stream);
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

/// Before a copy after `after`, on its thread. See Note [Streams that nobody has noted].
void CudaTransferBackend::ask_streams(const FencePtr& after) {
  if (to_ask_.empty() || after == nullptr) {
    return;
  }
  std::lock_guard<std::mutex> lock(asked_mutex_);
  if (static_cast<const CudaFence&>(*after).number() <= asked_fences_) {
    return;
  }
  DeviceScope scope(device_);
  uint64_t fences = 0;
  size_t noted = 0;
  {
    std::lock_guard<std::mutex> streams_lock(streams_mutex_);
    fences = fences_;
    noted = stream_count_.load(std::memory_order_relaxed);
  }
  const cudaStream_t* const fenced_end = streams_.data() + fenced_streams_;
  CudaFence busy(device_);
  for (cudaStream_t stream : to_ask_) {
    const cudaStream_t* const begin = streams_.data();
    if (std::find(begin, fenced_end, stream) != fenced_end) {
      continue;
    }
    bool captured = is_capturing(stream);
    if (!captured && cudaStreamQuery(stream) == cudaErrorNotReady) {
      note_stream(stream);
      busy.record(stream);
      captured = is_capturing(stream); // then the event may be a part of the graph
    }
    if (captured) {
      note_stream(stream); // later requests see the capture themselves
      throw PageoutRefused(
          "expected no capture of a CUDA graph while a tensor is paged out, found one that began "
          "before the copy did; wait for page-outs before a capture, or page out after it");
    }
  }
  cudaGetLastError(); // cudaErrorNotReady must not stick
  busy.order(out_.stream);
  asked_fences_ = fences;
  fenced_streams_ = noted;
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
  ask_streams(after);
  return copy(out_, host, device, nbytes, cudaMemcpyDeviceToHost, after);
}

FencePtr CudaTransferBackend::copy_to_device(
    void* device,
    const void* host,
    size_t nbytes,
    const FencePtr& after) {
  return copy(in_, device, host, nbytes, cudaMemcpyHostToDevice, after);
}

bool CudaTransferBackend::copy_on_device(void* to, const void* from, size_t nbytes) {
  DeviceScope scope(device_);
  const cudaStream_t current = current_stream_();
  std::vector<cudaStream_t> others = noted_streams();
  others.erase(std::remove(others.begin(), others.end(), current), others.end());
  if (is_capturing(current) || std::any_of(others.begin(), others.end(), &is_capturing)) {
    return false;
  }
  CudaFence before(device_);
  for (cudaStream_t other : others) {
    before.record(other);
  }
  before.order(current);
  check_cuda(
      cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDeviceToDevice, current), "to submit a copy");
  if (!others.empty()) {
    CudaFence after(device_);
    after.record(current);
    std::for_each(others.begin(), others.end(), [&](cudaStream_t other) { after.order(other); });
  }
  return true;
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
