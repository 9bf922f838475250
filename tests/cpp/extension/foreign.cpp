// An extension of somebody else's: it takes an address, calls PyTorch, and then uses it.

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include "foreign.h"

int64_t sum_while_allocating(const at::Tensor& tensor, int64_t elements, int64_t tensors) {
  const auto* data = tensor.const_data_ptr<int64_t>(); // nothing tells of it
  int64_t wrong = 0;
  for (int64_t i = 0; i < tensors; ++i) {
    const at::Tensor temporary = at::full({elements}, i, at::kLong);
    wrong += temporary.eq(i).all().item<bool>() ? 0 : 1;
  }
  int64_t sum = wrong * (int64_t{1} << 40);
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    sum += data[i];
  }
  return sum;
}

void call_back(void (*call)(void*), void* context) {
  call(context);
}
