// CUDA's runtime on a machine without a GPU, as far as the fork's device and c10_cuda use it: main
// memory, and streams that are threads. For what is to be seen without a GPU: the order of work,
// and races. Programs that load it before the runtime itself find one device.

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#ifdef __SANITIZE_THREAD__
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace {

/// What a device does to memory is no race of the program's: a page-out that has been called off
/// may read what is being written, and what it read is thrown away.
struct UnseenWork {
#ifdef __SANITIZE_THREAD__
  UnseenWork() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~UnseenWork() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  ~UnseenWork() {}
#endif
};

/// A point in a stream's work.
struct Point {
  bool passed = false;
};

/// All of a device's state has one lock, and work runs without it.
std::mutex& device_mutex() {
  static auto* mutex = new std::mutex();
  return *mutex;
}
std::condition_variable& device_changed() {
  static auto* changed = new std::condition_variable();
  return *changed;
}

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) {
    last_error = error;
  }
  return error;
}

class Stream {
 public:
  static Stream& of(cudaStream_t stream) {
    static auto* legacy = new Stream();
    return stream == nullptr ? *legacy : *reinterpret_cast<Stream*>(stream);
  }

  /// In a capture, work is noted for the graph, which nobody here launches.
  void add(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(device_mutex());
    add_locked(std::move(work));
  }
  void add_locked(std::function<void()> work) {
    if (capturing_) {
      return;
    }
    if (!started_) {
      started_ = true;
      std::thread([this] { run(); }).detach();
    }
    work_.push_back(std::move(work));
    device_changed().notify_all();
  }
  bool idle() const {
    return work_.empty();
  }
  bool capturing() const {
    return capturing_;
  }
  void capture(bool capturing) {
    std::lock_guard<std::mutex> lock(device_mutex());
    capturing_ = capturing;
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(device_mutex());
    for (;;) {
      device_changed().wait(lock, [this] { return !work_.empty(); });
      const std::function<void()> next = work_.front();
      lock.unlock();
      next();
      lock.lock();
      work_.pop_front(); // only now: until then the stream is busy
      device_changed().notify_all();
    }
  }

  std::deque<std::function<void()>> work_;
  bool started_ = false;
  bool capturing_ = false;
};

std::vector<Stream*>& streams() {
  static auto* all = new std::vector<Stream*>{&Stream::of(nullptr)};
  return *all;
}

struct Event {
  std::shared_ptr<Point> recorded;
};

Event& event_of(cudaEvent_t event) {
  return *reinterpret_cast<Event*>(event);
}

void await(const std::function<bool()>& condition) {
  std::unique_lock<std::mutex> lock(device_mutex());
  device_changed().wait(lock, condition);
}

cudaError_t make_stream(cudaStream_t* stream) {
  std::lock_guard<std::mutex> lock(device_mutex());
  streams().push_back(new Stream());
  *stream = reinterpret_cast<cudaStream_t>(streams().back());
  return cudaSuccess;
}

} // namespace

extern "C" {

// --- the device ---------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  await([] {
    for (const Stream* stream : streams()) {
      if (!stream->idle()) {
        return false;
      }
    }
    return true;
  });
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return std::exchange(last_error, cudaSuccess);
}
const char* cudaGetErrorName(cudaError_t) {
  return "an error of the fake runtime";
}
const char* cudaGetErrorString(cudaError_t) {
  return "see tests/fork/fake_cuda.cpp";
}

// --- memory -------------------------------------------------------------------------

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = *total_bytes = size_t{16} << 30;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** data, size_t nbytes) {
  const bool made = posix_memalign(data, 512, nbytes) == 0;
  return result(made ? cudaSuccess : cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* data) {
  cudaDeviceSynchronize();
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** data, size_t nbytes, unsigned) {
  return cudaMalloc(data, nbytes);
}
cudaError_t cudaHostRegister(void*, size_t, unsigned) {
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void*) {
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) {
  return result(cudaErrorNotSupported);
}
cudaError_t cudaIpcCloseMemHandle(void*) {
  return result(cudaErrorNotSupported);
}

// --- streams ------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return make_stream(stream);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return make_stream(stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t) {
  return cudaSuccess; // what is under way goes on
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(device_mutex());
  if (Stream::of(stream).capturing()) {
    return result(cudaErrorStreamCaptureUnsupported);
  }
  return result(Stream::of(stream).idle() ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  await([stream] { return Stream::of(stream).idle(); });
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(
    void* to,
    const void* from,
    size_t nbytes,
    cudaMemcpyKind,
    cudaStream_t stream) {
  Stream::of(stream).add([to, from, nbytes] {
    const UnseenWork unseen;
    std::memcpy(to, from, nbytes);
  });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* data, int value, size_t nbytes, cudaStream_t stream) {
  Stream::of(stream).add([data, value, nbytes] {
    const UnseenWork unseen;
    std::memset(data, value, nbytes);
  });
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  Stream::of(stream).add([function, argument] { function(argument); });
  return cudaSuccess;
}

// --- captures -----------------------------------------------------------------------

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  std::lock_guard<std::mutex> lock(device_mutex());
  *status =
      Stream::of(stream).capturing() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  Stream::of(stream).capture(true);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Stream::of(stream).capture(false);
  *graph = nullptr;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) {
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}

// --- events -------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event());
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &event_of(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  auto point = std::make_shared<Point>();
  std::lock_guard<std::mutex> lock(device_mutex());
  event_of(event).recorded = point;
  Stream::of(stream).add_locked([point] {
    std::lock_guard<std::mutex> passing(device_mutex());
    point->passed = true;
  });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  std::lock_guard<std::mutex> lock(device_mutex());
  const auto& point = event_of(event).recorded;
  return result(point == nullptr || point->passed ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  std::shared_ptr<Point> point;
  {
    std::lock_guard<std::mutex> lock(device_mutex());
    point = event_of(event).recorded;
  }
  await([&point] { return point == nullptr || point->passed; });
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  std::lock_guard<std::mutex> lock(device_mutex());
  const std::shared_ptr<Point> point = event_of(event).recorded;
  if (point != nullptr) {
    Stream::of(stream).add_locked([point] { await([&point] { return point->passed; }); });
  }
  return cudaSuccess;
}

} // extern "C"
