#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/impl/SwapEnvironment.h>
#include <torch/library.h>

namespace at {
namespace native {

// The bytes of a tensor are the same wherever they are: to autograd, these two do nothing.

void pageout_manual(const Tensor& self) {
  c10::impl::SwapEnvironment::get().pageout(*self.storage().unsafeGetStorageImpl());
}

void need_prefetch(const Tensor& self) {
  c10::impl::SwapEnvironment::get().prefetch(*self.storage().unsafeGetStorageImpl());
}

namespace {

c10::impl::SwapEnvironment& environment() {
  return c10::impl::SwapEnvironment::get();
}

void create_env(int64_t host_limit_bytes) {
  TORCH_CHECK_VALUE(
      host_limit_bytes >= 0,
      "expected a host_limit of 0 (a part of the machine's memory) or more bytes, found ",
      host_limit_bytes);
  environment().open(static_cast<size_t>(host_limit_bytes));
}

void prefetch_init() {
  environment().prefetch_init();
}

void wait_pageouts() {
  environment().wait_pageouts();
}

void prefetch_all() {
  environment().prefetch_all();
}

void close_env() {
  environment().close();
}

bool is_open() {
  return environment().is_open();
}

std::string state(const Tensor& self) {
  return torch_lms::to_string(environment().state(*self.storage().unsafeGetStorageImpl()));
}

} // namespace

// The functions of torch/cuda/swap.py. Registered here, they need no change of Python's module, and
// callers of operators let go of Python's lock.
TORCH_LIBRARY(storage_swap, m) {
  m.def("create_env", &create_env);
  m.def("prefetch_init", &prefetch_init);
  m.def("wait_pageouts", &wait_pageouts);
  m.def("prefetch_all", &prefetch_all);
  m.def("close_env", &close_env);
  m.def("is_open", &is_open);
  m.def("state", &state);
}

} // namespace native
} // namespace at
