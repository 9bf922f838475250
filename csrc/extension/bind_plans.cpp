#include <extension/bind_plans.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <pybind11/stl.h>

#include <entity/Error.h>
#include <extension/OwnPython.h>
#include <extension/base/Fork.h>
#include <extension/base/Interpreter.h>
#include <extension/bind_common.h>

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
  const std::unique_ptr<RecordedCycle> cycle = runtime().planning.take_recording();
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

/// Whole numbers of one kind, packed as `torch_lms.plan.recording.compile_plan` does it. Objects of
/// Python's, one for each, would make its garbage collector look through the whole program.
template <typename Number>
std::vector<Number> unpacked(const py::handle& plan, const char* name) {
  const auto data = plan[name].cast<std::string>();
  std::vector<Number> values(data.size() / sizeof(Number));
  std::memcpy(values.data(), data.data(), values.size() * sizeof(Number));
  return values;
}

/// Lists of storages' numbers, op by op: each behind how many there are.
class PackedLists {
 public:
  PackedLists(const py::handle& plan, const char* name, size_t storages)
      : name_(name), values_(unpacked<int32_t>(plan, name)), storages_(storages) {}

  std::vector<int32_t> next() {
    const size_t left = values_.size() - at_;
    if (left == 0 || values_[at_] < 0 || static_cast<size_t>(values_[at_]) > left - 1) {
      fail("a list for each op, found one that ends too soon");
    }
    const auto begin = values_.begin() + static_cast<std::ptrdiff_t>(at_) + 1;
    std::vector<int32_t> numbers(begin, begin + values_[at_]);
    at_ += numbers.size() + 1;
    for (const int32_t number : numbers) {
      if (number < 0 || static_cast<size_t>(number) >= storages_) {
        fail(
            "numbers of storages below " + std::to_string(storages_) + ", found " +
            std::to_string(number));
      }
    }
    return numbers;
  }

 private:
  void fail(const std::string& what) const {
    throw Error("expected in '" + name_ + "' " + what + "; make the plan again");
  }

  std::string name_;
  std::vector<int32_t> values_;
  size_t storages_;
  size_t at_ = 0;
};

std::vector<PlannedOp> planned_ops(const py::dict& plan, size_t storages) {
  const auto keys = unpacked<uint64_t>(plan, "keys");
  const auto room = unpacked<uint64_t>(plan, "room");
  const auto binds = plan["binds"].cast<std::string>();
  if (binds.size() != keys.size() || room.size() != keys.size()) {
    throw Error(
        "expected flags and room for " + std::to_string(keys.size()) + " ops, found " +
        std::to_string(binds.size()) + " and " + std::to_string(room.size()) +
        "; make the plan again");
  }
  PackedLists inputs(plan, "inputs", storages);
  PackedLists outputs(plan, "outputs", storages);
  PackedLists remade(plan, "remade", storages);
  PackedLists drops(plan, "drops", storages);
  PackedLists drops_again(plan, "drops_again", storages);
  PackedLists pageouts(plan, "pageouts", storages);
  PackedLists prefetches(plan, "prefetches", storages);
  std::vector<PlannedOp> ops(keys.size());
  for (size_t place = 0; place < ops.size(); ++place) {
    PlannedOp& op = ops[place];
    op.key = keys[place];
    op.inputs = inputs.next();
    op.outputs = outputs.next();
    op.remade = remade.next();
    op.drops = drops.next();
    op.drops_again = drops_again.next();
    op.pageouts = pageouts.next();
    op.prefetches = prefetches.next();
    op.room_bytes = room[place];
    op.binds = binds[place] != 0;
  }
  return ops;
}

void add_plan(const py::dict& plan) {
  auto compiled = std::make_shared<CompiledPlan>();
  compiled->signature = plan["signature"].cast<std::string>();
  compiled->timed = plan["timed"].cast<bool>();
  compiled->device = c10::Device(plan["device"].cast<std::string>());
  compiled->limit_bytes = plan["limit_bytes"].cast<size_t>();
  for (const char flag : plan["recurring"].cast<std::string>()) {
    compiled->recurring.push_back(flag != 0);
  }
  compiled->ops = planned_ops(plan, compiled->recurring.size());
  using Held = std::tuple<size_t, int32_t, int32_t>;
  for (const auto& [nbytes, since, until] : plan["placeholders"].cast<std::vector<Held>>()) {
    compiled->placeholders.push_back({nbytes, since, until});
  }
  const py::gil_scoped_release no_gil;
  runtime().planning.add(std::move(compiled));
}

int start_planning(void*) {
  if (in_forked_child()) { // It was asked for before the fork.
    return 0;
  }
  call_own("torch_lms.swap.planning", "start");
  return 0;
}

/// The main thread does it between two of its instructions. Others cannot, and the main thread may
/// wait for one of them to end.
void make_plan() {
  if (!interpreter().on_main_thread() || Py_AddPendingCall(&start_planning, nullptr) != 0) {
    const py::gil_scoped_acquire gil; // also where others have as many calls pending as may be
    start_planning(nullptr);
  }
}

std::pair<std::string, std::string> where() {
  const py::gil_scoped_acquire gil;
  const py::object here = call_own("torch_lms.swap.where", "here");
  return here ? here.cast<std::pair<std::string, std::string>>()
              : std::pair<std::string, std::string>();
}

} // namespace

void bind_plans(py::module_& module) {
  interpreter().make_plan = &make_plan;
  interpreter().where = &where;
  module.def("plan_program", [](const std::string& device, bool may_drop) {
    check_not_forked();
    runtime().planning.enable(device_named(device), may_drop);
  });
  module.def("plan_no_program", [] { runtime().planning.disable(); });
  module.def("take_recording", &take_recording);
  module.def("take_times", [] {
    PlanTimes found = runtime().planning.take_times();
    py::dict values;
    values["times_us"] = std::move(found.cycle.device_us);
    values["host_us"] = std::move(found.cycle.host_us);
    values["caught_up"] = std::move(found.cycle.caught_up);
    values["pageout_us"] = found.pageout_us;
    values["pagein_us"] = found.pagein_us;
    values["recompute_us"] = found.recompute_us;
    return std::make_pair(std::move(found.signature), std::move(values));
  });
  module.def("add_plan", &add_plan);
  module.def(
      "no_plan", [] { runtime().planning.no_plan(); }, py::call_guard<py::gil_scoped_release>());
  module.def(
      "make_dropped_again",
      [] {
        if (!in_forked_child()) {
          runtime().pager.make_dropped_again();
        }
      },
      py::call_guard<py::gil_scoped_release>());
  module.def("measured_plan", [] {
    const MeasuredPlan found = runtime().planning.measured();
    return std::make_tuple(found.signature, found.step_us, found.peak_bytes, found.wait_us);
  });
  module.def("share_in_step", [] { return runtime().planning.share_in_step(); });
  module.def("pages_on_demand", [] { return runtime().planning.on_demand(); });
  module.def("follows_timed_plan", [] { return runtime().planning.follows_timed_plan(); });
}

} // namespace torch_lms
