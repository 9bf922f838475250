// What cycles under a plan take, and wait for memory.

#include <extension/access/StepMeter.h>

#include "rig.h"

namespace torch_lms {
namespace {

using std::chrono::microseconds;

const StepMeter::Clock::time_point kStart{std::chrono::hours(1)};

std::shared_ptr<const CompiledPlan> plan_of(const char* signature) {
  auto plan = std::make_shared<CompiledPlan>();
  plan->signature = signature;
  return plan;
}

TEST(a_plan_has_the_median_of_what_its_cycles_take_and_wait) {
  StepMeter meter;
  const auto plan = plan_of("a");
  CHECK(meter.end_cycle(plan, 1, 1000, kStart) == 0); // nobody has seen its beginning
  CHECK(meter.end_cycle(plan, 9, 1500, kStart + microseconds(700)) == 700); // still clears up
  CHECK(meter.measured().step_us == 0);
  meter.end_cycle(plan, 2, 1510, kStart + microseconds(800));
  meter.end_cycle(plan, 4, 1540, kStart + microseconds(1000));
  meter.end_cycle(plan, 3, 1560, kStart + microseconds(1300));
  const MeasuredPlan found = meter.measured();
  CHECK(found.signature == "a");
  CHECK(found.step_us == 200);
  CHECK(found.wait_us == 20);
  CHECK(found.peak_bytes == 4);
}

TEST(another_plan_begins_anew) {
  StepMeter meter;
  const auto before = plan_of("a");
  const auto plan = plan_of("b");
  for (int i = 0; i < 4; ++i) {
    meter.end_cycle(before, 9, 500 * i, kStart + microseconds(1000 * i));
  }
  meter.end_cycle(plan, 1, 2000, kStart + microseconds(4000));
  CHECK(meter.measured().signature == "b");
  CHECK(meter.measured().step_us == 0);
  meter.end_cycle(plan, 1, 2005, kStart + microseconds(4100));
  CHECK(meter.measured().step_us == 100);
  CHECK(meter.measured().wait_us == 5);
}

TEST(what_was_waited_before_somebody_reset_the_counters_is_not_known) {
  StepMeter meter;
  const auto plan = plan_of("a");
  meter.end_cycle(plan, 1, 0, kStart);
  meter.end_cycle(plan, 1, 900, kStart + microseconds(100));
  meter.end_cycle(plan, 1, 30, kStart + microseconds(200));
  CHECK(meter.measured().wait_us == 30);
}

} // namespace
} // namespace torch_lms
