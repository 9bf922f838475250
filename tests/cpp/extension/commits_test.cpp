// Commits that another thread is in the middle of, and those that fail.

#include <atomic>
#include <chrono>
#include <future>
#include <new>
#include <stdexcept>
#include <thread>

#include "failing_new.h"
#include "rig.h"

namespace torch_lms {
namespace {

/// Runs at the next allocation of the thread that makes one of these, when it has taken what is to
/// be committed.
class InTheMiddle {
 public:
  explicit InTheMiddle(std::function<void()> action) : watched_(0) {
    action_of_thread() = std::move(action);
    may_fail() = &run;
  }
  ~InTheMiddle() {
    may_fail() = &is_of_the_extension;
    CHECK(action_of_thread() == nullptr); // or nothing has been tested
    action_of_thread() = nullptr;
  }
  InTheMiddle(const InTheMiddle&) = delete;
  InTheMiddle& operator=(const InTheMiddle&) = delete;

 private:
  static std::function<void()>& action_of_thread() {
    static thread_local std::function<void()> action;
    return action;
  }
  static bool run(const void* caller) {
    if (is_of_the_extension(caller) && !lms().pager.has_finished()) {
      if (const auto action = std::exchange(action_of_thread(), nullptr)) {
        action();
      }
    }
    return false;
  }

  const FailingNew watched_;
};

/// What a thread that waits finds, while this one is in the middle of its commits.
std::string found_by_who_waits(const at::Tensor& tensor, const std::function<void()>& wait) {
  std::string found;
  std::promise<void> returned;
  std::thread waiter;
  {
    const InTheMiddle of_commits([&] {
      waiter = std::thread([&] {
        wait();
        found = state(tensor);
        returned.set_value();
      });
      // It has time to go wrong.
      returned.get_future().wait_for(std::chrono::milliseconds(100));
    });
    lms().pager.commit_finished();
  }
  waiter.join();
  return found;
}

TEST(who_waits_for_pageouts_waits_for_those_that_another_thread_commits) {
  const Settled settled;
  const at::Tensor tensor = tensor_of(3);
  page_out({tensor});
  lms().pager.out_queue().wait_pending();
  REQUIRE(state(tensor) == "paging_out");
  CHECK_EQ(found_by_who_waits(tensor, [] { lms().manual.wait_pageouts(); }), "paged_out");
  CHECK(holds(tensor, 3));
}

/// See Note [Waits inside of ops]
TEST(who_waits_inside_of_an_op_waits_for_those_that_another_thread_commits) {
  const Settled settled;
  const at::Tensor tensor = tensor_of(3);
  page_out({tensor});
  lms().pager.out_queue().wait_pending();
  CHECK_EQ(
      found_by_who_waits(
          tensor,
          [] {
            const RecordedOp op("aten::add", {});
            CHECK(this_thread().op != nullptr);
            lms().pager.wait_pageouts();
          }),
      "paged_out");
}

TEST(who_waits_for_pageins_waits_for_those_that_another_thread_commits) {
  const Settled settled;
  const at::Tensor tensor = tensor_of(3);
  REQUIRE(go_out(tensor));
  REQUIRE(prefetch(tensor) == 1);
  lms().pager.in_queue().wait_pending();
  REQUIRE(state(tensor) == "paging_in");
  CHECK_EQ(found_by_who_waits(tensor, [] { lms().manual.wait_pageins(); }), "resident");
}

/// See Note [Page-ins that are not committed]
template <typename Failure>
void fail_a_commit(const Failure& failure, const char* said) {
  const Settled settled;
  const at::Tensor tensor = tensor_of(3);
  REQUIRE(go_out(tensor));
  REQUIRE(prefetch(tensor) == 1);
  lms().pager.in_queue().wait_pending();
  {
    const InTheMiddle fails([&] { throw failure; });
    lms().pager.commit_finished(); // as an op does, which has nothing to do with it
  }
  CHECK_EQ(state(tensor), "paging_in");
  CHECK_THROWS(lms().manual.wait_pageins(), Failure, said);
  lms().manual.wait_pageins(); // once
  CHECK(holds(tensor, 3));
  CHECK_EQ(state(tensor), "resident");
}

TEST(want_of_the_hosts_memory_at_a_commit_is_told_to_who_waits) {
  fail_a_commit(std::bad_alloc(), "");
}

TEST(whatever_fails_at_a_commit_is_told_to_who_waits) {
  fail_a_commit(std::logic_error("something else"), "something else");
}

TEST(the_end_of_all_makes_up_for_a_commit_that_found_no_memory) {
  const Settled settled;
  const at::Tensor tensor = tensor_of(3);
  REQUIRE(go_out(tensor));
  REQUIRE(prefetch(tensor) == 1);
  lms().pager.in_queue().wait_pending();
  {
    const InTheMiddle fails([] { throw std::bad_alloc(); });
    lms().pager.commit_finished();
  }
  lms().disable();
  CHECK_EQ(state(tensor), "resident");
  CHECK(holds(tensor, 3));
}

} // namespace
} // namespace torch_lms
