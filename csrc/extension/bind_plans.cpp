#include <extension/bind_plans.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <pybind11/stl.h>

#include <entity/Error.h>
#include <extension/Runtime.h>
#include <extension/base/Fork.h>
#include <extension/base/Interpreter.h>

namespace py = pybind11;

namespace torch_lms {
namespace {

py::dict as_dict(const TraceOp& op) {
  py::dict values;
  values["name"] = op.name;
  values["key"] = op.key;
  values["backward"] = op.backward;
  values["duration_us"] = op.duration_us;
  values["allocated_bytes"] = op.allocated_bytes;
  values["paged_out_bytes"] = op.paged_out_bytes;
  values["peak_bytes"] = op.peak_bytes;
  values["inputs"] = op.inputs;
  values["written"] = op.written;
  values["outputs"] = op.outputs;
  return values;
}

py::dict as_dict(const TraceStorage& storage) {
  py::dict values;
  values["bytes"] = storage.nbytes;
  values["recurring"] = storage.recurring;
  values["producer"] = storage.producer;
  values["released"] = storage.released;
  values["movable"] = storage.movable;
  values["raw_access"] = storage.raw_access;
  values["ingredients"] = storage.ingredients;
  values["rewrites"] = storage.rewrites;
  values["outside_bytes"] = storage.outside_bytes;
  values["why_not_recompute"] = storage.why_not_recompute;
  values["module"] = storage.module;
  values["line"] = storage.line;
  return values;
}

py::object take_recording() {
  const std::unique_ptr<RecordedCycle> cycle = Runtime::get().planning.take_recording();
  if (cycle == nullptr) {
    return py::none();
  }
  py::list ops;
  for (const TraceOp& op : cycle->ops) {
    ops.append(as_dict(op));
  }
  py::list storages;
  for (const TraceStorage& storage : cycle->storages) {
    storages.append(as_dict(storage));
  }
  py::dict values;
  values["device"] = cycle->device;
  values["ops"] = ops;
  values["storages"] = storages;
  return std::move(values);
}

std::vector<int32_t> numbers(const py::handle& op, const char* name, size_t storages) {
  const auto values = op[name].cast<std::vector<int32_t>>();
  for (const int32_t value : values) {
    if (value < 0 || static_cast<size_t>(value) >= storages) {
      throw Error(
          "expected numbers of storages below " + std::to_string(storages) + " in '" + name +
          "', found " + std::to_string(value) + "; make the plan again");
    }
  }
  return values;
}

void add_plan(const py::dict& plan) {
  auto compiled = std::make_shared<CompiledPlan>();
  compiled->signature = plan["signature"].cast<std::string>();
  compiled->timed = plan["timed"].cast<bool>();
  compiled->device = c10::Device(plan["device"].cast<std::string>());
  compiled->recurring = plan["recurring"].cast<std::vector<bool>>();
  const size_t storages = compiled->recurring.size();
  for (const py::handle& planned : plan["ops"]) {
    PlannedOp op;
    op.key = planned["key"].cast<uint64_t>();
    op.inputs = numbers(planned, "inputs", storages);
    op.outputs = numbers(planned, "outputs", storages);
    op.drops = numbers(planned, "drops", storages);
    op.drops_again = numbers(planned, "drops_again", storages);
    op.pageouts = numbers(planned, "pageouts", storages);
    op.prefetches = numbers(planned, "prefetches", storages);
    op.binds = planned["binds"].cast<bool>();
    op.makes_recipe = planned["makes_recipe"].cast<bool>();
    compiled->ops.push_back(std::move(op));
  }
  for (const auto& held : plan["placeholders"].cast<std::vector<std::pair<size_t, int32_t>>>()) {
    compiled->placeholders.push_back({held.first, held.second});
  }
  const py::gil_scoped_release no_gil;
  Runtime::get().planning.add(std::move(compiled));
}

int start_planning(void*) {
  try {
    py::module_::import("torch_lms.swap.planning").attr("start")();
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("torch_lms.swap.planning");
  }
  return 0;
}

/// The main thread does it between two of its instructions. Others cannot, and the main thread may
/// wait for one of them to end.
void make_plan() {
  if (interpreter().on_main_thread()) {
    Py_AddPendingCall(&start_planning, nullptr);
  } else {
    const py::gil_scoped_acquire gil;
    start_planning(nullptr);
  }
}

std::pair<std::string, std::string> where() {
  const py::gil_scoped_acquire gil;
  try {
    return py::module_::import("torch_lms.swap.where")
        .attr("here")()
        .cast<std::pair<std::string, std::string>>();
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("torch_lms.swap.where");
    return {};
  }
}

} // namespace

void bind_plans(py::module_& module) {
  interpreter().make_plan = &make_plan;
  interpreter().where = &where;
  module.def("plan_program", [](const std::string& device) {
    Runtime::get().planning.enable(*Runtime::get().devices.find(c10::Device(device)));
  });
  module.def("take_recording", &take_recording);
  module.def("take_times", [] {
    PlanTimes found = Runtime::get().planning.take_times();
    return std::make_pair(std::move(found.signature), std::move(found.times_us));
  });
  module.def("add_plan", &add_plan);
  module.def(
      "make_dropped_again",
      [] {
        if (!in_forked_child()) {
          Runtime::get().pager.make_dropped_again();
        }
      },
      py::call_guard<py::gil_scoped_release>());
  module.def("measured_plan", [] {
    const MeasuredPlan found = Runtime::get().planning.measured();
    return std::make_tuple(found.signature, found.step_us, found.peak_bytes);
  });
  module.def("share_in_step", [] { return Runtime::get().planning.share_in_step(); });
  module.def("pages_on_demand", [] { return Runtime::get().planning.on_demand(); });
  module.def("follows_timed_plan", [] { return Runtime::get().planning.follows_timed_plan(); });
}

} // namespace torch_lms
