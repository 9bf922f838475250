#include <exception>
#include <functional>
#include <string>
#include <vector>

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <entity/Error.h>

#include <extension/Chaos.h>
#include <extension/Compat.h>
#include <extension/CountingCpuAllocator.h>
#include <extension/CpuDevice.h>
#include <extension/Fork.h>
#include <extension/MemoryPressure.h>
#include <extension/OpObserver.h>
#include <extension/PageoutBatch.h>
#include <extension/Pager.h>
#include <extension/TorchStorageBinding.h>

namespace py = pybind11;

namespace torch_lms {
namespace {

c10::Storage storage_of(const py::handle& object) {
  if (THPVariable_Check(object.ptr())) {
    const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
    if (!tensor.has_storage()) {
      throw PageoutRefused(
          "expected a tensor with a storage, found one of layout " +
          std::string(c10::str(tensor.layout())) +
          " or a wrapper; page out the tensors it is made of (for a sparse tensor: "
          "tensor.indices() and tensor.values())");
    }
    return tensor.storage();
  }
  if (torch::isStorage(object.ptr())) {
    return torch::createStorage(object.ptr());
  }
  throw py::type_error(
      "expected a torch.Tensor or a torch.UntypedStorage, found " +
      std::string(py::str(py::type::of(object).attr("__name__"))) +
      "; pass tensors, or lists of them");
}

void check_not_forked() {
  if (in_forked_child()) {
    throw Error(
        "expected the process that torch_lms was first used in, found a child forked from it; "
        "storages stay where they are in a forked child: start it with 'spawn' to page there");
  }
}

std::vector<c10::Storage> storages_of(const py::sequence& objects) {
  check_not_forked();
  std::vector<c10::Storage> storages;
  storages.reserve(objects.size());
  for (const py::handle object : objects) {
    storages.push_back(storage_of(object));
  }
  return storages;
}

int64_t enqueue_pageouts(const std::vector<c10::Storage>& storages) {
  const py::gil_scoped_release no_gil;
  let_go_of_raw();
  Pager::get().out_queue().start_actions();
  PageoutBatch batch;
  try {
    for (const c10::Storage& storage : storages) {
      batch.add(storage);
    }
  } catch (const PageoutRefused&) {
    batch.submit(); // Those before it go out.
    throw;
  }
  batch.submit();
  return static_cast<int64_t>(batch.enqueued());
}

int64_t pageout(const py::sequence& objects) {
  check_not_forked();
  std::vector<c10::Storage> storages;
  std::exception_ptr refused; // of the first that is none; those before it go out
  for (size_t i = 0; i < objects.size() && refused == nullptr; ++i) {
    try {
      storages.push_back(storage_of(objects[i]));
    } catch (const PageoutRefused&) {
      refused = std::current_exception();
    }
  }
  const int64_t count = enqueue_pageouts(storages);
  if (refused != nullptr) {
    std::rethrow_exception(refused);
  }
  return count;
}

int64_t prefetch(const py::sequence& objects, bool start) {
  const auto storages = storages_of(objects);
  const py::gil_scoped_release no_gil;
  Pager& pager = Pager::get();
  if (start) {
    pager.in_queue().start_actions();
  }
  int64_t count = 0;
  for (const c10::Storage& storage : storages) {
    count += pager.prefetch(storage) ? 1 : 0;
  }
  return count;
}

void use(const py::sequence& objects) {
  const auto storages = storages_of(objects);
  const py::gil_scoped_release no_gil;
  for (const c10::Storage& storage : storages) {
    Pager::get().raw_access(storage.unsafeGetStorageImpl());
  }
}

/// Storages that stay on their device while one of these lives: raw kernels run on them.
class HeldStorages {
 public:
  explicit HeldStorages(const std::vector<c10::Storage>& storages) {
    for (const c10::Storage& storage : storages) {
      EntityPtr entity = entity_of_input(*storage.unsafeGetStorageImpl());
      if (entity != nullptr) {
        entity->pin();
        entities_.push_back(std::move(entity));
      }
    }
    use_pinned(entities_, 0, /*stay=*/false);
  }
  ~HeldStorages() {
    for (const EntityPtr& entity : entities_) {
      entity->unpin();
    }
  }
  HeldStorages(const HeldStorages&) = delete;
  HeldStorages& operator=(const HeldStorages&) = delete;

 private:
  std::vector<EntityPtr> entities_;
};

std::unique_ptr<HeldStorages> hold(const py::sequence& objects) {
  const auto storages = storages_of(objects);
  const py::gil_scoped_release no_gil;
  return std::make_unique<HeldStorages>(storages);
}

/// The entity's state, `resident` for a storage without one.
std::string state(const py::handle& object) {
  const c10::Storage storage = storage_of(object);
  const EntityPtr entity = Pager::get().find(*storage.unsafeGetStorageImpl());
  return to_string(entity == nullptr ? EntityState::kResident : entity->state());
}

c10::Device parse_device(const std::string& device) {
  return c10::Device(device);
}

Device& device_named(const std::string& name) {
  Device* device = find_device(parse_device(name));
  if (device == nullptr) {
    throw Error(
        "expected a device with paging (cpu, or cuda:N in a build with CUDA), found '" + name +
        "'");
  }
  return *device;
}

void enable(const std::string& device_name, size_t limit_bytes, size_t min_bytes) {
  check_not_forked();
  const py::gil_scoped_release no_gil;
  Device& device = device_named(device_name);
  MemoryPressure::get().enable(device, limit_bytes);
  device.control(limit_bytes);
  track_storages(min_bytes);
  device.note_busy_streams();
}

void disable() {
  check_not_forked();
  const py::gil_scoped_release no_gil;
  Pager& pager = Pager::get();
  std::exception_ptr failed;
  const auto attempt = [&failed](const std::function<void()>& step) {
    try {
      step();
    } catch (...) { // The rest has to be undone all the same.
      failed = std::current_exception();
    }
  };
  attempt([&] { pager.wait_pageouts(); });
  attempt([&] { pager.wait_pageins(); });
  MemoryPressure::get().disable();
  for_each_device([](Device& device, void*) { device.uncontrol(); }, nullptr);
  attempt([&] { pager.pagein_all(); });
  stop_tracking_storages();
  if (failed != nullptr) {
    std::rethrow_exception(failed);
  }
}

py::dict stats(bool reset) {
  Pager& pager = Pager::get();
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
  values["host_served"] = counters.host_served.load();
  values["pagein_failures"] = counters.pagein_failures.load();
  values["allocation_retries"] = counters.allocation_retries.load();
  values["wait_us"] = counters.wait_us.load();
  values["paged_out_bytes"] = pager.paged_out_bytes();
  values["paged_out_storages"] = pager.paged_out_storages();
  values["tracked_storages"] = pager.table().size();
  HostPoolStats host;
  struct Sum {
    HostPoolStats* host;
    size_t allocated = 0;
    size_t peak = 0;
    size_t limit = 0;
    bool reset;
    const HostPool* seen = nullptr;
  } sum{&host, 0, 0, 0, reset, nullptr};
  for_each_device(
      [](Device& device, void* context) {
        auto* sum = static_cast<Sum*>(context);
        if (sum->seen != device.pool().get()) {
          const HostPoolStats pool = device.pool()->stats();
          sum->host->slab_bytes += pool.slab_bytes;
          sum->host->used_bytes += pool.used_bytes;
          sum->host->limit_bytes += pool.limit_bytes;
          sum->seen = device.pool().get();
        }
        sum->allocated += device.allocated_bytes();
        sum->peak += device.peak_allocated_bytes();
        sum->limit += MemoryPressure::get().limit_bytes(device);
        if (sum->reset) {
          device.reset_peak();
        }
      },
      &sum);
  values["host_bytes"] = host.slab_bytes;
  values["host_used_bytes"] = host.used_bytes;
  values["host_limit_bytes"] = host.limit_bytes;
  values["allocated_bytes"] = sum.allocated;
  values["peak_allocated_bytes"] = sum.peak;
  values["limit_bytes"] = sum.limit;
  if (reset) {
    counters.reset();
  }
  return values;
}

void bind_errors(py::module_& module) {
  // The classes live in Python (torch_lms.errors): translated by name at run time.
  static py::object errors = py::module_::import("torch_lms.errors");
  errors.inc_ref(); // outlives the interpreter's teardown order
  py::register_exception_translator([](std::exception_ptr caught) {
    const auto raise = [](const char* name, const std::exception& error) {
      PyErr_SetString(errors.attr(name).ptr(), error.what());
    };
    try {
      if (caught) {
        std::rethrow_exception(caught);
      }
    } catch (const HostPoolFull& error) {
      raise("HostPoolFullError", error);
    } catch (const SpillFailed& error) {
      raise("SpillError", error);
    } catch (const PageoutRefused& error) {
      raise("PageoutError", error);
    } catch (const Error& error) {
      raise("LmsError", error);
    }
  });
  static_cast<void>(module);
}

void bind_requests(py::module_& module) {
  module.def("pageout", &pageout);
  module.def("prefetch", &prefetch, py::arg("storages"), py::arg("start") = true);
  module.def("use", &use);
  py::class_<HeldStorages>(module, "HeldStorages");
  module.def("hold", &hold);
  module.def("state", &state);
  module.def("pin", [](const py::handle& object) {
    check_not_forked();
    const c10::Storage storage = storage_of(object);
    const py::gil_scoped_release no_gil;
    Pager::get().keep_resident(storage);
  });
  module.def("unpin", [](const py::handle& object) {
    check_not_forked();
    const c10::Storage storage = storage_of(object);
    Pager::get().release_resident(storage);
  });
}

/// Nobody waits for these transfers any more: what failed stays where it is.
void stop_at_exit(CudaEntityTransferQueue& queue) {
  queue.start_actions(); // what has been enqueued without a worker is worked off
  try {
    queue.wait_and_stop_actions();
  } catch (const std::exception&) {
  }
}

void bind_queues(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def(
      "start_pageouts",
      [] {
        check_not_forked();
        Pager::get().out_queue().start_actions();
      },
      no_gil);
  module.def(
      "start_pageins",
      [] {
        check_not_forked();
        Pager::get().in_queue().start_actions();
      },
      no_gil);
  module.def(
      "hold_pageins",
      [] {
        check_not_forked();
        Pager::get().in_queue().start_actions();
        Pager::get().in_queue().wait_and_stop_actions();
        Pager::get().commit_finished();
        Pager::get().in_queue().open();
      },
      no_gil);
  module.def(
      "wait_pageouts",
      [] {
        check_not_forked();
        let_go_of_raw();
        Pager::get().wait_pageouts();
      },
      no_gil);
  module.def(
      "wait_pageins",
      [] {
        check_not_forked();
        Pager::get().wait_pageins();
      },
      no_gil);
  module.def(
      "pagein_all",
      [] {
        check_not_forked();
        Pager::get().pagein_all();
      },
      no_gil);
  module.def(
      "shutdown",
      [] {
        if (!in_forked_child()) {
          stop_at_exit(Pager::get().out_queue());
          stop_at_exit(Pager::get().in_queue());
        }
      },
      no_gil);
}

} // namespace
} // namespace torch_lms

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace torch_lms;
  module.doc() = "The compiled core of torch_lms. Use torch_lms and torch_lms.swap instead.";
  bind_errors(module);
  bind_requests(module);
  bind_queues(module);
  module.def("enable", &enable);
  module.def("disable", &disable);
  module.def("stats", &stats, py::arg("reset") = false);
  module.def("configure_host", [](size_t limit_bytes, const std::string& spill_dir) {
    check_not_forked();
    configure_host(HostOptions{limit_bytes, spill_dir});
  });
  module.def("total_bytes", [](const std::string& device) {
    // Asking for it opens no spill file yet.
    return device == "cpu" ? CpuDevice::memory_bytes() : device_named(device).total_bytes();
  });
  module.def("count_cpu_allocations", [] {
    find_device(c10::Device(c10::kCPU));
    CountingCpuAllocator::get().install();
  });
  module.def("observing_ops", &observing_ops);
  module.def("in_forked_child", &in_forked_child);
  module.def("enable_chaos", [](uint64_t seed, int64_t period) {
    Pager::get().out_queue().start_actions();
    Pager::get().in_queue().start_actions();
    Chaos::get().begin(seed, period);
    track_storages(1);
  });
  module.attr("has_materializer") = compat::kHasMaterializer;
#ifdef TORCH_LMS_WITH_CUDA
  module.attr("has_cuda") = true;
#else
  module.attr("has_cuda") = false;
#endif
}
