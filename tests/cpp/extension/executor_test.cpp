// What is carried out at the border of two cycles.

#include <extension/access/Executor.h>
#include <extension/access/Recorder.h>

#include "limited.h"
#include "made.h"

namespace torch_lms {
namespace {

/// A plan of two ops that use one tensor: it comes in behind the second one, for the next cycle.
class Planned {
 public:
  explicit Planned(size_t limit_bytes = SIZE_MAX) {
    REQUIRE(entity_ != nullptr);
    auto plan = std::make_shared<CompiledPlan>();
    plan->limit_bytes = limit_bytes;
    plan->device = Program::get().device().device();
    plan->recurring = {true};
    for (const size_t name : {1, 2}) {
      PlannedOp op;
      Frame frame;
      fill(frame, name);
      op.key = key_of_op(frame);
      op.inputs = {0};
      op.room_bytes = SIZE_MAX;
      op.binds = true;
      plan->ops.push_back(op);
    }
    plan->ops.back().prefetches = {0};
    executor.add(plan);
    executor.end_cycle(); // the plan's begins
  }

  void op(size_t name) {
    Frame frame;
    fill(frame, name);
    const at::RecordFunction record(at::RecordScope::FUNCTION);
    executor.begin_op(record, frame);
    executor.end_op(record, frame);
    frame.pinned.clear(); // nothing has been pinned
    executor.after_op(frame);
  }

  const at::Tensor& tensor() const {
    return tensor_;
  }

 private:
  void fill(Frame& frame, size_t name) const {
    frame.name = name;
    frame.pinned.push_back(entity_.get());
  }

  Observed observed_;
  Audition audition_;
  at::Tensor tensor_ = tensor_of(3);
  EntityPtr entity_ = tracked(tensor_);

 public:
  Executor executor{lms().pager, lms().policy, lms().recipes, audition_};
};

TEST(what_is_to_come_in_for_the_next_cycle_is_still_asked_for_when_that_begins) {
  Planned planned;
  planned.op(1);
  planned.op(2);
  REQUIRE(planned.executor.prefetches().any());
  planned.executor.end_cycle();
  CHECK(planned.executor.prefetches().any());
}

TEST(a_cycle_that_is_not_the_plan_s_leaves_nothing_asked_for) {
  Planned planned;
  planned.op(1);
  planned.op(2);
  planned.op(7);
  REQUIRE(planned.executor.prefetches().any());
  planned.executor.end_cycle();
  CHECK(!planned.executor.prefetches().any());
}

TEST(what_comes_in_keeps_to_the_plan_s_limit) {
  const Limited limited(8 * kMiB);
  for (const bool has_room : {true, false}) {
    Planned planned(has_room ? SIZE_MAX : 1);
    REQUIRE(go_out(planned.tensor()));
    planned.op(1);
    planned.op(2);
    planned.executor.prefetches().begin();
    CHECK_EQ(planned.executor.prefetches().any(), !has_room);
  }
}

} // namespace
} // namespace torch_lms
