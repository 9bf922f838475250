#include <entity/cuda/CudaFence.h>

#include <array>
#include <cstddef>
#include <exception>

#include <entity/cuda/CudaScope.h>

namespace torch_lms {
namespace {

/// Events are reused: creating one costs more than recording it. To give one back takes no memory:
/// whoever does it cannot fail.
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
      if (free_.capacity() == created_) {
        free_.reserve(2 * created_ + 1);
      }
      ++created_;
    }
    cudaEvent_t event = nullptr;
    check_cuda(
        cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync),
        "to create an event");
    return event;
  }
  void give(cudaEvent_t event) noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(event);
  }

 private:
  std::mutex mutex_; // guards what follows
  std::vector<cudaEvent_t> free_; // has room for all
  size_t created_ = 0; // or so many were to be
};

} // namespace

CudaFence::CudaFence(int device, cudaStream_t open_on, uint64_t number)
    : device_(device), number_(number), open_on_(open_on), open_(open_on != nullptr) {
  events_.reserve(1);
}

CudaFence::~CudaFence() {
  for (cudaEvent_t event : events_) {
    EventPool::get(device_).give(event);
  }
}

void CudaFence::record(cudaStream_t stream) {
  events_.reserve(events_.size() + 1);
  cudaEvent_t event = EventPool::get(device_).take();
  events_.push_back(event);
  check_cuda(cudaEventRecord(event, stream), "to record an event");
}

void CudaFence::close() {
  if (!open_.load(std::memory_order_acquire)) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (open_) {
    DeviceScope scope(device_);
    record(open_on_);
    open_.store(false, std::memory_order_release);
  }
}

bool CudaFence::done() noexcept {
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

void CudaFence::wait() {
  if (done()) {
    return;
  }
  close();
  const RelaxedCapture relaxed;
  for (cudaEvent_t event : events_) {
    check_cuda(cudaEventSynchronize(event), "to wait for a transfer");
  }
}

void CudaFence::order(cudaStream_t stream) {
  close();
  for (cudaEvent_t event : events_) {
    check_cuda(cudaStreamWaitEvent(stream, event, 0), "to order a stream after an event");
  }
}

} // namespace torch_lms
