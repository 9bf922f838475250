// Functions as most extensions have them: no ops; each takes a pointer, allocates, then goes
// through the pointer.

#include <torch/extension.h>

namespace {

// What is read, after an allocation of as many bytes as the tensor has.
double read_after_allocation(const at::Tensor& tensor) {
  const float* pointer = tensor.data_ptr<float>();
  at::Tensor allocated = at::full({tensor.numel()}, -1, tensor.options());
  double sum = 0;
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    sum += pointer[i];
  }
  return sum;
}

// Written after an allocation: has to be there when the tensor is read.
void write_after_allocation(const at::Tensor& tensor, float value) {
  float* pointer = tensor.data_ptr<float>();
  at::Tensor allocated = at::full({tensor.numel()}, -1, tensor.options());
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    pointer[i] = value;
  }
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("read_after_allocation", read_after_allocation);
  m.def("write_after_allocation", write_after_allocation);
}
