#include <extension/bind_common.h>

#include <string>

#include <extension/Runtime.h>

namespace py = pybind11;

namespace torch_lms {
namespace {

std::string attention() {
  switch (runtime().policy.attention()) {
    case Attention::kOff:
      return "off";
    case Attention::kLearning:
      return "learning";
    case Attention::kArmed:
      return "armed";
    case Attention::kAsleep:
      return "asleep";
  }
  return "unknown";
}

py::dict memory_report(const std::string& device_name) {
  check_not_forked();
  MemoryReport report;
  HostPoolStats host;
  {
    const py::gil_scoped_release no_gil;
    Device& device = device_named(device_name);
    report = runtime().policy.report(device);
    host = device.pool()->stats();
  }
  py::dict values;
  values["limit_bytes"] = report.limit_bytes;
  values["host_limit_bytes"] = host.limit_bytes;
  values["allocated_bytes"] = report.allocated_bytes;
  values["reserved_bytes"] = report.reserved_bytes;
  values["movable_bytes"] = report.movable_bytes;
  values["in_use_bytes"] = report.in_use_bytes;
  values["fixed_bytes"] = report.fixed_bytes;
  values["leaving_bytes"] = report.leaving_bytes;
  values["unseen_bytes"] = report.unseen_bytes;
  values["held_bytes"] = report.held_bytes;
  values["other_bytes"] = report.other_bytes;
  return values;
}

py::dict stats(bool reset) {
  check_not_forked();
  Pager& pager = runtime().pager;
  Stats& counters = pager.stats();
  py::dict values;
  values["pageout_bytes"] = counters.pageout_bytes.load();
  values["pagein_bytes"] = counters.pagein_bytes.load();
  values["pageouts"] = counters.pageouts.load();
  values["pageins"] = counters.pageins.load();
  values["passive_pageins"] = counters.passive_pageins.load();
  values["prefetches"] = counters.prefetches.load();
  values["prefetch_hits"] = counters.prefetch_hits.load();
  values["cancelled_pageouts"] = counters.cancelled_pageouts.load();
  values["dropped_bytes"] = counters.dropped_bytes.load();
  values["recomputable_bytes"] = counters.recomputable_bytes.load();
  values["recomputed_bytes"] = counters.recomputed_bytes.load();
  values["recomputations"] = counters.recomputations.load();
  values["host_served"] = counters.host_served.load();
  values["limit_exceeded"] = counters.limit_exceeded.load();
  values["pagein_failures"] = counters.pagein_failures.load();
  values["allocation_retries"] = counters.allocation_retries.load();
  values["wait_us"] = counters.wait_us.load();
  values["paged_out_bytes"] = pager.paged_out_bytes();
  values["paged_out_storages"] = pager.paged_out_storages();
  values["tracked_storages"] = pager.table().size();
  HostPoolStats host;
  DeviceUse use;
  size_t limit_bytes = 0;
  const HostPool* seen = nullptr;
  runtime().devices.for_each([&](Device& device) {
    if (seen != device.pool().get()) {
      const HostPoolStats pool = device.pool()->stats();
      host.slab_bytes += pool.slab_bytes;
      host.used_bytes += pool.used_bytes;
      host.limit_bytes += pool.limit_bytes;
      seen = device.pool().get();
    }
    const DeviceUse of_device = device.use();
    use.allocated_bytes += of_device.allocated_bytes;
    use.peak_allocated_bytes += of_device.peak_allocated_bytes;
    limit_bytes += device.limit_bytes();
    if (reset) {
      device.reset_peak();
    }
  });
  values["host_bytes"] = host.slab_bytes;
  values["host_used_bytes"] = host.used_bytes;
  values["host_limit_bytes"] = host.limit_bytes;
  values["allocated_bytes"] = use.allocated_bytes;
  values["peak_allocated_bytes"] = use.peak_allocated_bytes;
  values["limit_bytes"] = limit_bytes;
  if (reset) {
    counters.reset();
  }
  return values;
}

} // namespace

void bind_reports(py::module_& module) {
  module.def("stats", &stats, py::arg("reset") = false);
  module.def("attention", &attention);
  module.def("memory_report", &memory_report);
}

} // namespace torch_lms
