// How long ops take, without what they wait for.

#include <chrono>
#include <thread>
#include <utility>

#include <extension/access/OpTimes.h>

#include "rig.h"

namespace torch_lms {
namespace {

using Lead = OpTimes::Lead;
using Microseconds = std::chrono::duration<double, std::micro>;

/// A device whose clock goes on when it is told; null on the real CPU.
AsyncDevice* clock_of_device() {
  return Program::get().async;
}

TEST(an_op_takes_what_it_does_not_wait) {
  AsyncDevice* const device = clock_of_device();
  if (device == nullptr) {
    return;
  }
  OpTimes times;
  times.begin(*device, Lead::kThere);
  times.begin_op(0);
  device->ticks += 5;
  times.pause(*device);
  device->ticks += 100;
  times.resume(*device);
  device->ticks += 7;
  times.pause(*device);
  device->ticks += 100;
  times.resume(*device);
  times.end_op(0);
  device->ticks += 100; // between ops
  times.begin_op(2);
  device->ticks += 3;
  times.end_op(2);
  times.begin_op(3); // which never ends
  CHECK(times.end(4).device_us == std::vector<double>({12, 0, 3, 0}));
  CHECK(!times.on());
}

TEST(a_wait_inside_of_a_wait_does_not_end_it) {
  AsyncDevice* const device = clock_of_device();
  if (device == nullptr) {
    return;
  }
  OpTimes times;
  times.begin(*device, Lead::kThere);
  times.begin_op(0);
  device->ticks += 5;
  times.pause(*device);
  device->ticks += 100;
  times.pause(*device); // for room to move a block to
  device->ticks += 100;
  times.resume(*device);
  device->ticks += 100;
  times.resume(*device);
  device->ticks += 7;
  times.end_op(0);
  times.pause(*device); // between ops
  times.pause(*device);
  times.resume(*device);
  times.resume(*device);
  times.begin_op(1);
  device->ticks += 2;
  times.end_op(1);
  CHECK(times.end(2).device_us == std::vector<double>({12, 2}));
}

TEST(what_happens_outside_of_ops_is_not_counted) {
  AsyncDevice* const device = clock_of_device();
  if (device == nullptr) {
    return;
  }
  OpTimes times;
  times.begin_op(0);
  times.resume(*device);
  CHECK(times.end(1).device_us.empty()); // it was never on
  times.begin(*device, Lead::kThere);
  times.pause(*device);
  times.resume(*device);
  times.begin_op(1);
  device->ticks += 4;
  times.end_op(1);
  times.resume(*device); // nothing waits
  device->ticks += 4;
  times.end_op(7); // another op
  CHECK(times.end(2).device_us == std::vector<double>({0, 4}));
  times.begin(*device, Lead::kThere);
  times.abandon();
  CHECK(times.end(2).device_us.empty());
}

TEST(a_cycle_in_which_a_graph_is_captured_is_not_timed) {
  AsyncDevice* const device = clock_of_device();
  if (device == nullptr) {
    return;
  }
  const int before = device->leads;
  OpTimes times;
  times.begin(*device, Lead::kMade);
  times.begin_op(0);
  times.end_op(0);
  device->captures.store(true);
  times.begin_op(1);
  times.pause(*device);
  times.resume(*device);
  times.end_op(1);
  device->captures.store(false);
  CHECK_EQ(device->leads - before, 1);
  CHECK(!times.on());
  CHECK(times.end(2).device_us.empty());
}

TEST(the_host_gets_no_other_lead_while_it_has_one) {
  AsyncDevice* const device = clock_of_device();
  if (device == nullptr) {
    return;
  }
  const int before = device->leads;
  const auto lead = std::exchange(device->lead, std::chrono::hours(1));
  OpTimes times;
  times.begin(*device, Lead::kMade);
  const auto run = [&](int32_t place) {
    times.begin_op(place);
    times.end_op(place);
  };
  run(0);
  run(1); // the device waits at most for as long as it says
  CHECK_EQ(device->leads - before, 1);
  times.begin(*device, Lead::kMade);
  device->lead = std::chrono::microseconds(1);
  device->behind.store(true);
  run(0);
  std::this_thread::sleep_for(std::chrono::microseconds(10));
  run(1); // it has not begun to wait
  CHECK_EQ(device->leads - before, 2);
  device->behind.store(false);
  run(2);
  CHECK_EQ(device->leads - before, 3);
  device->lead = std::chrono::microseconds(0);
  std::this_thread::sleep_for(std::chrono::microseconds(10));
  run(3);
  run(4); // there is nothing to lead
  CHECK_EQ(device->leads - before, 4);
  device->lead = lead;
}

TEST(the_host_gets_a_lead_before_each_part_of_an_op_where_it_has_none) {
  AsyncDevice* const device = clock_of_device();
  if (device == nullptr) {
    return;
  }
  for (const Lead lead : {Lead::kMade, Lead::kThere}) {
    const int before = device->leads;
    OpTimes times;
    times.begin(*device, lead);
    times.begin_op(0);
    times.pause(*device);
    std::this_thread::sleep_for(std::chrono::microseconds(10)); // longer than a lead
    times.resume(*device);
    times.end_op(0);
    CHECK_EQ(device->leads - before, lead == Lead::kMade ? 2 : 0);
  }
}

/// Sleeps. Returns for how long at least.
Microseconds sleep_ms(int milliseconds) {
  const std::chrono::milliseconds asked(milliseconds);
  std::this_thread::sleep_for(asked);
  return asked;
}

TEST(the_hosts_time_has_neither_waits_nor_actions) {
  AsyncDevice* const device = clock_of_device();
  if (device == nullptr) {
    return;
  }
  ActionTimes actions;
  OpTimes times(&actions);
  times.begin(*device, Lead::kThere);
  const auto began = ActionTimes::Clock::now();
  times.begin_op(0);
  const Microseconds own = sleep_ms(2);
  times.pause(*device);
  Microseconds others = sleep_ms(8);
  times.resume(*device);
  times.end_op(0);
  {
    ActionTimes::Timer timer(actions, Action::kPageout);
    timer.count();
    others += sleep_ms(4);
  }
  times.begin_op(1);
  const Microseconds passed = ActionTimes::Clock::now() - began;
  times.end_op(1);
  const CycleTimes found = times.end(3);
  CHECK_EQ(found.host_us.size(), size_t{3});
  CHECK(found.host_us[0] >= own.count());
  CHECK(found.host_us[0] <= (passed - others).count());
  CHECK(found.host_us[1] >= 0);
  CHECK_EQ(found.host_us[2], 0.0); // it did not run
  CHECK(actions.mean_us(Action::kPageout) >= 4000);
  CHECK_EQ(actions.mean_us(Action::kPagein), 0.0);
}

TEST(an_action_is_counted_without_what_is_nested_in_it) {
  AsyncDevice* const device = clock_of_device();
  if (device == nullptr) {
    return;
  }
  ActionTimes actions;
  { const ActionTimes::Timer off(actions, Action::kPagein); }
  OpTimes times(&actions);
  times.begin(*device, Lead::kThere);
  times.begin_op(0);
  const auto began = ActionTimes::Clock::now();
  Microseconds inner{0};
  {
    ActionTimes::Timer outer(actions, Action::kRecompute);
    outer.count();
    {
      ActionTimes::Timer nested(actions, Action::kPagein);
      nested.count();
      inner += sleep_ms(4);
    }
    times.pause(*device);
    inner += sleep_ms(4);
    times.resume(*device);
  }
  { const ActionTimes::Timer part(actions, Action::kRecompute); } // no action of its own
  const Microseconds passed = ActionTimes::Clock::now() - began;
  CHECK(actions.mean_us(Action::kPagein) >= 4000);
  CHECK(actions.mean_us(Action::kRecompute) > 0);
  CHECK(actions.mean_us(Action::kRecompute) <= (passed - inner).count());
  times.abandon();
  { const ActionTimes::Timer off(actions, Action::kPagein); }
  CHECK(Microseconds(actions.spent()) <= passed);
}

TEST(the_device_has_caught_up_where_all_before_is_done) {
  AsyncDevice* const device = clock_of_device();
  if (device == nullptr) {
    return;
  }
  OpTimes times;
  times.begin(*device, Lead::kThere);
  times.begin_op(0);
  device->behind.store(true);
  times.end_op(0);
  times.begin_op(1);
  times.end_op(1);
  device->behind.store(false); // the device gets there
  times.begin_op(2);
  times.end_op(2);
  CHECK(times.end(4).caught_up == std::vector<bool>({true, false, true, false}));
}

} // namespace
} // namespace torch_lms
