// The switches that ops are run again with: afterwards they are as they were, also where they were
// set, and one thread's are not another's.

#include <extension/access/NumericState.h>

#include <chrono>
#include <future>
#include <memory>
#include <thread>

#include "torch_harness.h"

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
