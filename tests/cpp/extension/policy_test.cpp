// Automatic mode: limits are kept and results are right, whoever runs ops; and it gives way inside
// of other extensions' functions.

#include <dlfcn.h>

#include <ATen/ops/mm.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/rrelu_with_noise_ops.h>
#include <libgen.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include <extension/base/ForeignCall.h>

#include "foreign.h"
#include "limited.h"

namespace torch_lms {
namespace {

TEST(more_than_fits_is_right_within_the_limit) {
  const Limited limited(4 * kMiB);
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 60; ++i) {
    tensors.push_back(tensor_of(i, kElements));
  }
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 60; ++i) {
      REQUIRE(holds(tensors[static_cast<size_t>(i)], i + round));
      tensors[static_cast<size_t>(i)].add_(1);
    }
  }
  CHECK(limited.kept());
  CHECK(pageouts() > 40);
  CHECK_EQ(lms().pager.stats().limit_exceeded.load(), 0);
  tensors.clear();
}

std::vector<size_t> resident(const std::vector<at::Tensor>& tensors) {
  std::vector<size_t> found;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (state(tensors[i]) == "resident") {
      found.push_back(i);
    }
  }
  return found;
}

TEST(what_is_used_after_an_order_was_made_is_passed_over) {
  const Limited limited(8 * kMiB);
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 28; ++i) {
    tensors.push_back(tensor_of(i, kElements));
  }
  std::vector<at::Tensor> more{tensor_of(28, 8 * kElements)}; // an order is made, some of it serves
  lms().manual.wait_pageouts();
  const std::vector<size_t> before = resident(tensors);
  REQUIRE(before.size() < tensors.size() && before.size() > 16);
  // Which would go out next nobody says: half of them, wherever they are in the order.
  std::vector<size_t> used;
  for (size_t i = 0; i < 8; ++i) {
    used.push_back(before[2 * i]);
    tensors[used.back()].add_(1);
  }
  more.push_back(tensor_of(29, 4 * kElements));
  more.push_back(tensor_of(30, 4 * kElements));
  lms().manual.wait_pageouts();
  CHECK(resident(tensors).size() + 8 <= before.size());
  for (const size_t i : used) {
    CHECK_EQ(state(tensors[i]), std::string("resident"));
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool added = std::find(used.begin(), used.end(), i) != used.end();
    CHECK(holds(tensors[i], static_cast<int64_t>(i) + (added ? 1 : 0)));
  }
  CHECK(limited.kept());
}

/// Whoever has looked meanwhile: nobody is told that it stays.
TEST(what_has_not_left_after_all_may_go_again) {
  const Settled settled;
  const PolicyOptions options;
  const CycleTracker cycles;
  DeviceWatch watch;
  watch.begin(Program::get().device(), options);
  const at::Tensor tensor = tensor_of(3);
  const EntityPtr entity = tracked(tensor);
  watch.note_resident(entity);
  const auto may_go = [&] { return !watch.resident_by_next_use(cycles, 0).empty(); };
  REQUIRE(may_go());
  for (const bool begins : {false, true}) {
    const std::shared_ptr<PageoutTransfer> requested = entity->begin_request();
    REQUIRE(requested != nullptr && entity->finish_request(requested));
    std::shared_ptr<PageoutTransfer> begun;
    REQUIRE(!begins || entity->begin_pageout(&begun));
    CHECK_EQ(state(tensor), begins ? "paging_out" : "out_queued");
    CHECK(!may_go());
    entity->abandon_pageout(requested); // its copy has failed, say
    CHECK_EQ(state(tensor), "resident");
    CHECK(may_go());
  }
  REQUIRE(go_out(tensor));
  CHECK(!may_go());
  CHECK(holds(tensor, 3));
}

/// See Note [Ops larger than the limit]: an op lets go of an input for a moment, to have it go out.
TEST(what_another_thread_pages_out_while_an_op_lets_go_of_it_has_what_the_op_writes) {
  fake_device("nothing tells when an op lets go");
  const Limited limited(9 * kMiB / 2);
  const at::Tensor given = at::full({1 << 18}, 2, at::kFloat);
  const at::Tensor storage = at::full({1 << 19}, 7, at::kFloat); // larger: it is to go first
  at::Tensor written = storage.slice(0, 0, 1 << 18);
  const EntityPtr entity = lms().pager.find(*storage.storage().unsafeGetStorageImpl());
  REQUIRE(entity != nullptr);
  bool requested = false;
  Program::get().async->when_noted = [&] {
    in_threads(1, [&](int) {
      requested = lms().pager.requests().evict(entity);
      while (requested && !lms().pager.out_queue().has_finished()) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    });
  };
  at::_ops::rrelu_with_noise::call( // writes 1 where a number is positive
      given, written, 0.1, 0.3, /*training=*/true, std::nullopt);
  REQUIRE(requested);
  CHECK(holds(written, 1));
}

TEST(what_is_leaving_or_coming_when_a_large_op_begins_is_read_from_the_host) {
  fake_device("copies cannot be held");
  const Limited limited(2 * kMiB);
  const at::Tensor tensor = tensor_of(3, 200 * 1024);
  for (const bool leaves : {true, false}) {
    const int64_t before = lms().pager.stats().host_served.load();
    if (!leaves) {
      REQUIRE(go_out(tensor));
    }
    auto held = std::make_unique<HeldCopies>();
    if (leaves) {
      page_out({tensor});
    } else {
      REQUIRE(lms().pager.requests().prefetch(tensor.storage()));
    }
    REQUIRE(state(tensor) != "paged_out" && state(tensor) != "resident");
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      held = nullptr;
    });
    const at::Tensor sum = tensor.add(1);
    other.join();
    CHECK(lms().pager.stats().host_served.load() > before);
    CHECK(holds(sum, 4));
  }
}

TEST(what_somebody_elses_op_has_the_address_of_stays_for_what_it_calls) {
  const Limited limited(17 * kMiB / 4);
  const at::Tensor held = at::full({1 << 17}, 2, at::kFloat);
  const at::Tensor other = at::full({4, 1 << 17}, 3, at::kFloat);
  const RecordedOp op("some::op", {held}); // small enough
  const void* address = held.const_data_ptr();
  REQUIRE(state(held) == "resident");
  const at::Tensor sum = held.add(other); // too large for the limit, with what it reads
  CHECK(lms().pager.stats().host_served.load() > 0);
  CHECK_EQ(state(held), std::string("resident"));
  CHECK(held.const_data_ptr() == address);
  CHECK(holds(sum, 5));
}

void hold(const std::vector<std::pair<size_t, int32_t>>& blocks) {
  for (const auto& block : blocks) {
    lms().policy.placeholders().want(block.first, block.second);
  }
  lms().policy.hold_placeholders(Program::get().device());
}

TEST(a_placeholder_is_in_use_until_its_op_begins) {
  const Limited limited(4 * kMiB);
  Placeholders& held = lms().policy.placeholders();
  const size_t before = allocated();
  hold({{kMiB, 7}, {kMiB, 9}});
  CHECK(allocated() >= before + 2 * kMiB);
  CHECK_EQ(lms().policy.report(Program::get().device()).held_bytes, 2 * kMiB);
  CHECK_EQ(held.missing_bytes(), 0U);
  hold({{4 * kMiB, 9}}); // beyond the limit
  CHECK(allocated() < before + 3 * kMiB);
  CHECK_EQ(held.missing_bytes(), 4 * kMiB);
  held.release_until(6);
  CHECK(allocated() >= before + 2 * kMiB);
  held.release_until(7);
  CHECK(allocated() < before + 2 * kMiB);
  held.release();
  CHECK_EQ(allocated(), before);
  CHECK_EQ(held.missing_bytes(), 0U);
  CHECK(!held.lend_last());
  CHECK(limited.kept());
}

TEST(who_needs_room_gets_a_placeholder_before_anything_goes_out) {
  const Limited limited(4 * kMiB);
  Placeholders& held = lms().policy.placeholders();
  const at::Tensor kept = tensor_of(3, kElements);
  hold({{kMiB, 7}, {2 * kMiB, 8}});
  const int64_t out = pageouts();
  {
    const at::Tensor more = tensor_of(5, 4 * kElements);
    CHECK_EQ(pageouts(), out);
    CHECK(holds(kept, 3));
    CHECK(holds(more, 5));
    CHECK_EQ(held.missing_bytes(), 2 * kMiB); // the last alone
  }
  hold({});
  CHECK_EQ(held.missing_bytes(), 0U); // and it is held again
  CHECK(allocated() > limited.limit_bytes - kMiB);
  held.release();
  CHECK(limited.kept());
}

TEST(nothing_is_held_without_a_limit) {
  const Settled settled;
  const size_t before = allocated();
  hold({{kMiB, 7}});
  CHECK_EQ(allocated(), before);
  lms().policy.placeholders().release();
}

TEST(blocks_that_come_too_late_are_not_held) {
  const Settled settled;
  const size_t before = allocated();
  Placeholders held;
  held.hold(Program::get().device().allocate_placeholder(kMiB), kMiB);
  CHECK_EQ(allocated(), before);
}

TEST(what_cannot_fit_says_so_and_what_fits_goes_on) {
  const Limited limited(4 * kMiB);
  const at::Tensor kept = tensor_of(3, kElements);
  CHECK_THROWS(tensor_of(0, 1 << 20), c10::OutOfMemoryError, "limit");
  CHECK(holds(kept, 3));
  CHECK(holds(tensor_of(5, kElements), 5));
  CHECK(limited.kept());
}

TEST(servers_share_weights_under_a_limit) {
  const Limited limited(5 * kMiB);
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 16; ++i) {
    weights.push_back(tensor_of(i, kElements));
  }
  std::atomic<int> wrong{0};
  std::atomic<int> refused{0};
  in_threads(4, [&](int t) {
    std::mt19937 random(static_cast<unsigned>(t));
    for (int request = 0; request < 15; ++request) {
      try {
        at::Tensor value = tensor_of(request, kElements);
        int64_t expected = request;
        for (int layer = 0; layer < 16; ++layer) {
          const size_t chosen = random() % weights.size();
          value = value.add(weights[chosen]);
          expected += static_cast<int64_t>(chosen);
        }
        wrong += holds(value, expected) ? 0 : 1;
      } catch (const c10::OutOfMemoryError&) {
        ++refused;
      }
    }
  });
  CHECK_EQ(wrong.load(), 0);
  CHECK(refused.load() < 6);
  CHECK(limited.kept());
  CHECK(pageouts() > 10);
  for (int i = 0; i < 16; ++i) {
    CHECK(holds(weights[static_cast<size_t>(i)], i));
  }
  weights.clear();
}

/// The outer op may have its address, which it has not shown anybody.
TEST(what_an_op_has_made_inside_of_itself_waits_for_its_end_when_another_thread_wants_it_out) {
  const Limited limited(64 * kMiB);
  const at::Tensor input = tensor_of(3);
  const at::Tensor made = [] {
    const at::DisableRecordFunctionGuard inside_of_an_op;
    return tensor_of(4);
  }();
  const auto must_wait = [](const at::Tensor& tensor) {
    const EntityPtr entity =
        lms().lookup.find_for_address(*tensor.storage().unsafeGetStorageImpl());
    REQUIRE(entity != nullptr);
    bool waits = false;
    std::thread([&] {
      REQUIRE(entity->request_pageout());
      waits = entity->pageout_must_wait();
    }).join();
    AccessResult result = AccessResult::kResident;
    entity->touch(&result); // called off
    CHECK(result == AccessResult::kCancelledPageout);
    return waits;
  };
  CHECK(!must_wait(input));
  {
    const RecordedOp op("some::op", {});
    CHECK(!must_wait(input)); // it was known before the op began
    CHECK(must_wait(made));
  }
  CHECK(!must_wait(made));
}

TEST(an_op_that_waits_for_room_does_not_wait_for_what_waits_for_it) {
  const Limited limited(4 * kMiB);
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 14; ++i) {
    tensors.push_back(tensor_of(i, kElements));
  }
  const auto start = std::chrono::steady_clock::now();
  {
    RecordedOp op("some::op", {tensors[0]});
    std::thread other([&] { // by hand: the op may use them unseen
      page_out({tensors[1], tensors[2], tensors[3], tensors[4], tensors[5], tensors[6]});
    });
    other.join();
    tensors.push_back(tensor_of(14, 6 * kElements));
  }
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
  CHECK(limited.kept());
  for (size_t i = 0; i < tensors.size(); ++i) {
    CHECK(holds(tensors[i], static_cast<int64_t>(i)));
  }
  tensors.clear();
}

TEST(who_has_planned_for_less_waits_for_what_is_on_its_way_out) {
  const Limited limited(64 * kMiB);
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 8; ++i) {
    tensors.push_back(tensor_of(i, kElements));
  }
  const auto pending = [] { return lms().pager.out_queue().pending_bytes(); };
  auto held = std::make_unique<HeldCopies>();
  page_out(tensors);
  if (Program::get().async != nullptr) {
    CHECK_EQ(pending(), 8 * kNbytes);
  }
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    held = nullptr;
  });
  lms().policy.wait_for_pageouts(Program::get().device(), 2 * kNbytes);
  CHECK(pending() <= 2 * kNbytes);
  other.join();
  lms().policy.wait_for_pageouts(Program::get().device(), 0);
  CHECK_EQ(pending(), 0);
  for (size_t i = 0; i < tensors.size(); ++i) {
    CHECK(holds(tensors[i], static_cast<int64_t>(i)));
  }
}

TEST(what_an_op_holds_is_not_waited_for) {
  const Limited limited(64 * kMiB);
  const at::Tensor used = tensor_of(1, kElements);
  const RecordedOp op("some::op", {used});
  std::thread other([&] { page_out({used}); });
  other.join();
  const auto start = std::chrono::steady_clock::now();
  lms().policy.wait_for_pageouts(Program::get().device(), 0);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
}

/// A forward and a backward of layers; returns the sum of the gradients.
double train(std::vector<at::Tensor>& weights, const at::Tensor& input) {
  at::Tensor value = input;
  for (const at::Tensor& weight : weights) {
    value = at::mm(value, weight).sin();
  }
  value.sum().backward();
  double sum = 0;
  for (at::Tensor& weight : weights) {
    sum += weight.grad().abs().sum().item<double>();
    weight.mutable_grad() = at::Tensor();
  }
  return sum;
}

TEST(training_has_the_gradients_that_it_has_without_a_limit) {
  Program::get();
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 24; ++i) {
    weights.push_back(at::rand({128, 128}, at::kDouble).requires_grad_());
  }
  const at::Tensor input = at::rand({256, 128}, at::kDouble);
  const double expected = train(weights, input);
  {
    const Limited limited(5 * kMiB); // all: 24 * (256 KiB * 2 + 128 KiB)
    for (int step = 0; step < 4; ++step) {
      CHECK_EQ(train(weights, input), expected);
    }
    CHECK(limited.kept());
    CHECK(pageouts() > 10);
    CHECK(lms().policy.cycles().shape().length > 0);
    CHECK(lms().policy.attention() == Attention::kArmed);
  }
}

// --- other extensions ----------------------------------------------------------------------------

/// foreign.so, which lies beside the program.
struct Foreign {
  Foreign() {
    char path[4096] = {};
    REQUIRE(readlink("/proc/self/exe", path, sizeof(path) - 1) > 0);
    void* library = dlopen((std::string(dirname(path)) + "/foreign.so").c_str(), RTLD_NOW);
    REQUIRE(library != nullptr);
    sum = reinterpret_cast<decltype(&sum_while_allocating)>(dlsym(library, "sum_while_allocating"));
    call = reinterpret_cast<decltype(&call_back)>(dlsym(library, "call_back"));
    REQUIRE(sum != nullptr && call != nullptr);
  }
  decltype(&sum_while_allocating) sum;
  decltype(&call_back) call;
};

TEST(a_foreign_call_is_known_by_its_frames) {
  Program::get();
  const Foreign foreign;
  CHECK(!in_foreign_call());
  bool inside = false;
  foreign.call([](void* result) { *static_cast<bool*>(result) = in_foreign_call(); }, &inside);
  CHECK(!inside); // the program, as the interpreter, has been called in between
}

TEST(what_a_foreign_call_has_the_address_of_stays_until_it_returns) {
  const Foreign foreign;
  const Limited limited(4 * kMiB);
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 24; ++i) {
    tensors.push_back(tensor_of(i, kElements));
  }
  for (int i = 0; i < 24; ++i) {
    const at::Tensor& tensor = tensors[static_cast<size_t>(i)];
    REQUIRE(holds(tensor, i)); // it is resident
    CHECK_EQ(foreign.sum(tensor, kElements, 20), i * kElements);
  }
  CHECK(pageouts() > 10);
  for (int i = 0; i < 24; ++i) {
    CHECK(holds(tensors[static_cast<size_t>(i)], i));
  }
  CHECK(allocated() <= limited.limit_bytes);
  tensors.clear();
}

TEST(the_limit_gives_way_in_a_foreign_call) {
  const Foreign foreign;
  const Limited limited(4 * kMiB);
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 14; ++i) { // all but full
    tensors.push_back(tensor_of(i, kElements));
  }
  const at::Tensor& tensor = tensors[13];
  REQUIRE(holds(tensor, 13));
  const int64_t before = pageouts();
  CHECK_EQ(foreign.sum(tensor, 8 * kElements, 3), 13 * kElements);
  CHECK(lms().pager.stats().limit_exceeded.load() > 0);
  CHECK_EQ(pageouts(), before); // nothing was vacated inside of it
  lms().pager.commit_finished();
  CHECK(holds(tensor, 13));
  tensors.clear();
}

// --- chaos -------------------------------------------------------------------------------------

TEST(results_are_right_whatever_moves_between_ops) {
  const Settled settled;
  lms().pager.out_queue().start_actions();
  lms().pager.in_queue().start_actions();
  lms().chaos.begin(7, 2);
  lms().policy.track_all(1);
  in_threads(3, [](int t) {
    std::mt19937 random(static_cast<unsigned>(t));
    std::vector<at::Tensor> own;
    std::vector<int64_t> values;
    for (int i = 0; i < 5; ++i) {
      own.push_back(tensor_of(i));
      values.push_back(i);
    }
    for (int i = 0; i < 300; ++i) {
      const size_t a = random() % own.size();
      const size_t b = random() % own.size();
      if (random() % 2 == 0) {
        own[a] = own[a].add(own[b]);
        values[a] = (values[a] + values[b]);
      } else {
        own[a].fill_(i);
        values[a] = i;
      }
      CHECK(holds(own[b], values[b]));
    }
  });
  CHECK(lms().pager.stats().pageouts.load() > 10);
}

} // namespace
} // namespace torch_lms
