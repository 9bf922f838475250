// As raw_pointer.cpp, on a GPU: the device goes through the pointer after the function's own
// allocation.

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/extension.h>

namespace {

double read_after_allocation(const at::Tensor& tensor) {
  const float* pointer = tensor.data_ptr<float>();
  at::Tensor allocated = at::full({tensor.numel()}, -1, tensor.options());
  at::Tensor copy = at::empty({tensor.numel()}, tensor.options().device(at::kCPU));
  C10_CUDA_CHECK(cudaMemcpyAsync(
      copy.data_ptr<float>(),
      pointer,
      tensor.nbytes(),
      cudaMemcpyDefault,
      c10::cuda::getCurrentCUDAStream()));
  C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream()));
  return copy.sum(at::kDouble).item<double>();
}

void write_after_allocation(const at::Tensor& tensor, float value) {
  float* pointer = tensor.data_ptr<float>();
  at::Tensor allocated = at::full({tensor.numel()}, -1, tensor.options());
  at::Tensor source = at::full({tensor.numel()}, value, tensor.options().device(at::kCPU));
  C10_CUDA_CHECK(cudaMemcpyAsync(
      pointer,
      source.data_ptr<float>(),
      tensor.nbytes(),
      cudaMemcpyDefault,
      c10::cuda::getCurrentCUDAStream()));
  C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream()));
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("read_after_allocation", read_after_allocation);
  m.def("write_after_allocation", write_after_allocation);
}
