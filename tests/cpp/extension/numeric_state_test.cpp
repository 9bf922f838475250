// The switches that ops are run again with: afterwards they are as they were, also where they were
// set, and one thread's are not another's.

#include <extension/access/NumericState.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>

#include "rig.h"

namespace torch_lms {
namespace {

using Backend = at::Float32Backend;
using Op = at::Float32Op;
using Precision = at::Float32Precision;

constexpr Precision kPrecisions[] = {Precision::NONE, Precision::IEEE, Precision::TF32};

void set(Backend backend, Op op, Precision precision) {
  at::globalContext().setFloat32Precision(backend, op, precision);
}

Precision seen(Backend backend, Op op) {
  return at::globalContext().float32Precision(backend, op);
}

/// One op of a backend, and what it inherits from.
struct Chain {
  Precision all;
  Precision backend;
  Precision op;

  void set_on(Backend of) const {
    set(Backend::GENERIC, Op::ALL, all);
    set(of, Op::ALL, backend);
    set(of, Op::MATMUL, op);
  }
};

std::vector<Chain> all_chains() {
  std::vector<Chain> chains;
  for (const Precision all : kPrecisions) {
    for (const Precision backend : kPrecisions) {
      for (const Precision op : kPrecisions) {
        chains.push_back({all, backend, op});
      }
    }
  }
  return chains;
}

/// What the op sees, whatever is set above it from now on.
std::vector<Precision> told_by(Backend of) {
  std::vector<Precision> told{seen(of, Op::MATMUL), seen(of, Op::ALL)};
  for (const Precision all : kPrecisions) {
    set(Backend::GENERIC, Op::ALL, all);
    told.push_back(seen(of, Op::ALL));
    told.push_back(seen(of, Op::MATMUL));
  }
  for (const Precision backend : kPrecisions) {
    set(of, Op::ALL, backend);
    told.push_back(seen(of, Op::MATMUL));
  }
  return told;
}

/// See Note [Inherited precisions]
TEST(precisions_are_set_where_they_were_set_before) {
  for (const Backend of : {Backend::CUDA, Backend::MKLDNN}) {
    for (const Chain& then : all_chains()) {
      then.set_on(of);
      const NumericState state = NumericState::now();
      for (const Chain& now : all_chains()) {
        now.set_on(of);
        const std::vector<Precision> expected = told_by(of);
        now.set_on(of);
        {
          const WithNumericState as_then(state);
          CHECK(NumericState::now() == state);
        }
        CHECK(told_by(of) == expected);
      }
    }
    Chain{Precision::NONE, Precision::NONE, Precision::NONE}.set_on(of);
  }
}

/// Nobody has set what convolutions of this backend see: it is another value than none.
TEST(a_precision_that_nobody_has_set_is_set_by_nobody_afterwards) {
  const Precision before = seen(Backend::CUDA, Op::CONV);
  const NumericState state = NumericState::now();
  set(Backend::GENERIC, Op::ALL, Precision::IEEE);
  const Precision inherited = seen(Backend::CUDA, Op::CONV);
  {
    const WithNumericState as_then(state);
  }
  CHECK(seen(Backend::CUDA, Op::CONV) == inherited);
  set(Backend::GENERIC, Op::ALL, Precision::NONE);
  CHECK(seen(Backend::CUDA, Op::CONV) == before);
}

/// See Note [Switches of the process]. The second one would put back what the first one has set.
TEST(of_two_threads_that_want_other_switches_each_has_them_alone) {
  const NumericState before = NumericState::now();
  NumericState one = before;
  NumericState other = before;
  one.cudnn_benchmark = !before.cudnn_benchmark;
  other.cudnn_deterministic = !before.cudnn_deterministic;
  std::promise<void> other_has_them;
  std::promise<void> one_is_over;
  NumericState seen_by_other;
  auto first = std::make_unique<WithNumericState>(one);
  std::thread second([&] {
    const WithNumericState as_other(other);
    other_has_them.set_value();
    seen_by_other = NumericState::now();
    one_is_over.get_future().wait();
  });
  const auto has_them = other_has_them.get_future();
  CHECK(has_them.wait_for(std::chrono::milliseconds(100)) == std::future_status::timeout);
  CHECK(NumericState::now() == one);
  {
    const WithNumericState as_before(before); // inside of its own
    CHECK(NumericState::now() == before);
  }
  first = nullptr;
  one_is_over.set_value();
  second.join();
  CHECK(seen_by_other == other);
  CHECK(NumericState::now() == before);
}

/// What differs from the program's in all kinds of switches; these are as in `chain` afterwards.
NumericState another(const Chain& chain) {
  Chain{Precision::TF32, Precision::IEEE, Precision::TF32}.set_on(Backend::MKLDNN);
  NumericState other = NumericState::now();
  chain.set_on(Backend::MKLDNN);
  other.default_dtype = c10::ScalarType::Double;
  other.deterministic = !other.deterministic;
  other.cudnn_benchmark = !other.cudnn_benchmark;
  other.threads += 1;
  return other;
}

TEST(a_child_has_the_programs_switches_while_another_thread_has_others) {
  lms(); // watches for forks
  const Chain chain{Precision::NONE, Precision::TF32, Precision::NONE};
  chain.set_on(Backend::MKLDNN);
  const NumericState before = NumericState::now();
  const NumericState other = another(chain);
  const std::vector<Precision> expected = told_by(Backend::MKLDNN);
  chain.set_on(Backend::MKLDNN);
  std::promise<void> has_them;
  std::promise<void> over;
  std::thread thread([&] {
    const WithNumericState as_other(other);
    has_them.set_value();
    over.get_future().wait();
  });
  has_them.get_future().wait();
  const bool passed = harness::passes_in_child([&] {
    CHECK(NumericState::now() == before);
    CHECK(told_by(Backend::MKLDNN) == expected);
    at::globalContext().setBenchmarkCuDNN(!before.cudnn_benchmark);
    CHECK(harness::passes_in_child([&] { // and the child's child has the child's
      CHECK(at::globalContext().benchmarkCuDNN() != before.cudnn_benchmark);
    }));
  });
  over.set_value();
  thread.join();
  CHECK(passed);
  CHECK(NumericState::now() == before);
  Chain{Precision::NONE, Precision::NONE, Precision::NONE}.set_on(Backend::MKLDNN);
}

TEST(a_child_has_the_programs_switches_while_another_thread_changes_them) {
  lms();
  const Chain chain{Precision::NONE, Precision::NONE, Precision::NONE};
  const NumericState before = NumericState::now();
  const NumericState other = another(chain);
  std::atomic<bool> over{false};
  std::thread thread([&] {
    while (!over) {
      const WithNumericState as_other(other);
    }
  });
  int passed = 0;
  for (int i = 0; i < 100 && passed == i; ++i) {
    passed += harness::passes_in_child([&] { CHECK(NumericState::now() == before); });
  }
  over = true;
  thread.join();
  CHECK_EQ(passed, 100);
  CHECK(NumericState::now() == before);
}

TEST(while_a_thread_has_other_switches_others_do_not_know_the_programs) {
  NumericState state = NumericState::now();
  const auto known_elsewhere = [] {
    return std::async(std::launch::async, [] { return NumericState::of_program(); }).get();
  };
  {
    const WithNumericState as_is(state);
    CHECK(known_elsewhere() == state);
  }
  state.cudnn_benchmark = !state.cudnn_benchmark;
  {
    const WithNumericState as_then(state);
    CHECK(!known_elsewhere().has_value());
    CHECK(NumericState::of_program() == state);
  }
  CHECK(known_elsewhere() == NumericState::now());
}

} // namespace
} // namespace torch_lms
