#pragma once

#include <cuda_runtime_api.h>

namespace torch_lms {

/// Throws TransferFailed if `status` is an error; `what` says what was tried.
void check_cuda(cudaError_t status, const char* what);

/// Whether a graph is being captured on the stream, or on one that it would wait for.
bool is_capturing(cudaStream_t stream) noexcept;

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

} // namespace torch_lms
