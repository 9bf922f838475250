#include <entity/cuda/CudaScope.h>

#include <string>

#include <entity/Error.h>

namespace torch_lms {

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

} // namespace torch_lms
