#include <algorithm>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/native/SwapLimit.h>
#include <c10/core/impl/Error.h>
#include <c10/core/impl/HostMemory.h>
#include <c10/core/impl/SwapCounters.h>
#include <c10/core/impl/SwapEnvironment.h>
#include <torch/library.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/need_prefetch_native.h>
#include <ATen/ops/pageout_manual_native.h>
#endif

namespace at {
namespace native {
namespace {

thread_local const char* error_kind_of_thread = "";

/// Notes what kind of error the thread meets, for torch_lms: Python sees the text alone.
template <typename Step>
auto noting_errors(const Step& step) -> decltype(step()) {
  error_kind_of_thread = "";
  try {
    return step();
  } catch (const torch_lms::PageoutRefused&) {
    error_kind_of_thread = "PageoutRefused";
    throw;
  } catch (const torch_lms::HostPoolFull&) {
    error_kind_of_thread = "HostPoolFull";
    throw;
  } catch (const torch_lms::SpillFailed&) {
    error_kind_of_thread = "SpillFailed";
    throw;
  } catch (const torch_lms::Error&) {
    error_kind_of_thread = "Error";
    throw;
  }
}

/// The kind of the thread's last error, empty for one that is not of paging. Forgets it.
std::string take_error_kind() {
  return std::exchange(error_kind_of_thread, "");
}

c10::impl::SwapEnvironment& environment() {
  return c10::impl::SwapEnvironment::get();
}

const Storage& storage_of(const Tensor& self) {
  if (!self.has_storage()) {
    throw torch_lms::PageoutRefused(
        "expected a tensor with a storage, found one of layout " + c10::str(self.layout()) +
        " or a wrapper; page out the tensors it is made of (for a sparse tensor: "
        "tensor.indices() and tensor.values())");
  }
  return self.storage();
}

c10::StorageImpl& impl_of(const Tensor& self) {
  return *storage_of(self).unsafeGetStorageImpl();
}

bool pageout_unless_pinned(const Tensor& self) {
  if (SwapLimit::get().is_pinned(storage_of(self))) {
    throw torch_lms::PageoutRefused(
        "expected a tensor that may be paged out, found one that is pinned; call "
        "torch_lms.swap.unpin first, or page out a copy of it (tensor.clone())");
  }
  return environment().pageout(impl_of(self));
}

} // namespace

// The bytes of a tensor are the same wherever they are: to autograd, these two do nothing. They are
// for all kinds of tensors: what has no device memory is refused in words.

void pageout_manual(const Tensor& self) {
  pageout_unless_pinned(self);
}

void need_prefetch(const Tensor& self) {
  environment().prefetch(impl_of(self));
}

namespace {

void create_env(int64_t host_limit_bytes) {
  TORCH_CHECK_VALUE(
      host_limit_bytes >= 0,
      "expected a host_limit of 0 (a part of the machine's memory) or more bytes, found ",
      host_limit_bytes);
  noting_errors([&] { environment().open(static_cast<size_t>(host_limit_bytes)); });
}

void prefetch_init() {
  noting_errors([] { environment().prefetch_init(); });
}

void wait_pageouts() {
  noting_errors([] { environment().wait_pageouts(); });
}

void prefetch_all() {
  noting_errors([] { environment().prefetch_all(); });
}

void close_env() {
  noting_errors([] { environment().close(); });
}

bool is_open() {
  return environment().is_open();
}

std::string state(const Tensor& self) {
  return noting_errors([&] { return torch_lms::to_string(environment().state(impl_of(self))); });
}

// --- for torch_lms -------------------------------------------------------------------

bool pageout(const Tensor& self) {
  return noting_errors([&] { return pageout_unless_pinned(self); });
}

bool prefetch(const Tensor& self) {
  return noting_errors([&] { return environment().prefetch(impl_of(self)); });
}

void wait_pending_pageouts() {
  noting_errors([] { environment().wait_pending_pageouts(); });
}

void wait_pending_pageins() {
  noting_errors([] { environment().wait_pending_pageins(); });
}

void pagein_all() {
  noting_errors([] { environment().pagein_all(); });
}

int64_t times_opened() {
  return environment().times_opened();
}

void set_host_limit(int64_t host_limit_bytes) {
  noting_errors([&] { environment().set_host_limit(static_cast<size_t>(host_limit_bytes)); });
}

int64_t host_memory_bytes() {
  return static_cast<int64_t>(
      std::min(torch_lms::physical_bytes(), torch_lms::cgroup_limit_bytes()));
}

c10::Dict<std::string, int64_t> stats(bool reset) {
  const c10::impl::SwapStats stats = environment().stats();
  c10::Dict<std::string, int64_t> values;
  values.insert("pageouts", stats.pageouts);
  values.insert("pageout_bytes", stats.pageout_bytes);
  values.insert("pageins", stats.pageins);
  values.insert("pagein_bytes", stats.pagein_bytes);
  values.insert("passive_pageins", stats.passive_pageins);
  values.insert("prefetches", stats.prefetches);
  values.insert("prefetch_hits", stats.prefetch_hits);
  values.insert("cancelled_pageouts", stats.cancelled_pageouts);
  values.insert("pagein_failures", stats.pagein_failures);
  values.insert("paged_out_storages", stats.paged_out_storages);
  values.insert("paged_out_bytes", stats.paged_out_bytes);
  values.insert("tracked_storages", stats.tracked_storages);
  values.insert("host_bytes", static_cast<int64_t>(stats.host.slab_bytes));
  values.insert("host_used_bytes", static_cast<int64_t>(stats.host.used_bytes));
  values.insert("host_limit_bytes", static_cast<int64_t>(stats.host.limit_bytes));
  if (reset) {
    c10::impl::swap_counters().reset();
  }
  return values;
}

void set_limit(std::string device, int64_t limit_bytes, int64_t min_bytes) {
  noting_errors([&] {
    SwapLimit::get().set(
        c10::Device(device), static_cast<size_t>(limit_bytes), static_cast<size_t>(min_bytes));
  });
}

void clear_limits() {
  noting_errors([] { SwapLimit::get().clear(); });
}

void pin(const Tensor& self) {
  noting_errors([&] { SwapLimit::get().pin(storage_of(self)); });
}

void unpin(const Tensor& self) {
  noting_errors([&] { SwapLimit::get().unpin(storage_of(self)); });
}

c10::Dict<std::string, int64_t> limit_stats(bool reset) {
  const SwapLimit::Stats stats = SwapLimit::get().stats(reset);
  c10::Dict<std::string, int64_t> values;
  values.insert("limit_bytes", static_cast<int64_t>(stats.limit_bytes));
  values.insert("limit_exceeded", static_cast<int64_t>(stats.exceeded));
  values.insert("wait_us", stats.wait_us);
  return values;
}

} // namespace

// The functions of torch/cuda/swap.py. Registered here, they need no change of Python's module, and
// callers of operators let go of Python's lock. Those of the second group are for torch_lms.
TORCH_LIBRARY(storage_swap, m) {
  m.def("create_env", &create_env);
  m.def("prefetch_init", &prefetch_init);
  m.def("wait_pageouts", &wait_pageouts);
  m.def("prefetch_all", &prefetch_all);
  m.def("close_env", &close_env);
  m.def("is_open", &is_open);
  m.def("state", &state);
  m.def("stats", &stats);

  m.def("pageout", &pageout);
  m.def("prefetch", &prefetch);
  m.def("wait_pending_pageouts", &wait_pending_pageouts);
  m.def("wait_pending_pageins", &wait_pending_pageins);
  m.def("pagein_all", &pagein_all);
  m.def("times_opened", &times_opened);
  m.def("set_host_limit", &set_host_limit);
  m.def("host_memory_bytes", &host_memory_bytes);
  m.def("take_error_kind", &take_error_kind);
  m.def("set_limit", &set_limit);
  m.def("clear_limits", &clear_limits);
  m.def("pin", &pin);
  m.def("unpin", &unpin);
  m.def("limit_stats", &limit_stats);
}

} // namespace native
} // namespace at
