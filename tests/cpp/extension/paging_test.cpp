// Paging by hand: storages that several threads share, die or change on the way, are written
// through raw addresses, or are inputs of records whose callbacks fail.

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SymNodeImpl.h>
#include <entity/Error.h>
#include <extension/base/Compat.h>

#include <random>

#include "rig.h"

namespace torch_lms {
namespace {

TEST(bytes_go_out_and_come_back_with_the_next_op) {
  const Settled settled;
  const at::Tensor tensor = tensor_of(3);
  CHECK_EQ(state(tensor), "resident");
  CHECK(go_out(tensor));
  CHECK(lms().callbacks.observing());
  CHECK_EQ(lms().pager.paged_out_storages(), 1);
  CHECK(holds(tensor, 3));
  CHECK_EQ(state(tensor), "resident");
  CHECK(go_out(tensor));
  CHECK_EQ(prefetch(tensor), 1);
  lms().manual.wait_pageins();
  CHECK_EQ(state(tensor), "resident");
  CHECK(!lms().callbacks.observing());
  CHECK(holds(tensor, 3));
}

/// See Note [Ops that began unseen]
TEST(ops_are_observed_no_more_when_nothing_has_been_out_for_a_while) {
  for (const bool beside_others : {false, true}) {
    const Settled settled;
    lms().callbacks.note_other_threads(beside_others);
    const at::Tensor tensor = tensor_of(3);
    const at::Tensor other = tensor_of(4);
    for (int i = 0; i < 2; ++i) { // also another time
      REQUIRE(go_out(tensor));
      REQUIRE(go_out(other));
      CHECK(holds(tensor, 3));
      for (int ops = 0; ops < 3000; ++ops) {
        tensor.eq(3);
      }
      CHECK(lms().callbacks.observing()); // the other one is out still
      CHECK(holds(other, 4));
      CHECK(lms().callbacks.observing());
      int ops = 0;
      while (lms().callbacks.observing() && ops < 3000) {
        tensor.eq(3);
        ++ops;
      }
      CHECK(!lms().callbacks.observing());
    }
    lms().callbacks.note_other_threads(false);
  }
}

TEST(what_ops_write_stays) {
  const Settled settled;
  at::Tensor tensor = tensor_of(0);
  for (int i = 1; i <= 50; ++i) {
    page_out({tensor});
    if (i % 3 != 0) {
      lms().manual.wait_pageouts();
    }
    tensor.add_(1);
    REQUIRE(holds(tensor, i));
  }
}

TEST(an_op_on_a_view_finds_what_is_out) {
  const Settled settled;
  at::Tensor tensor = tensor_of(5);
  REQUIRE(go_out(tensor));
  at::Tensor view = tensor.view({64, 128}).select(0, 3); // made while it is out
  view.add_(1);
  CHECK_EQ(state(tensor), "resident");
  CHECK(holds(view, 6));
  CHECK(holds(tensor.slice(0, 0, 3 * 128), 5));
}

/// Note [Stacks of values] in Storages.h.
TEST(an_op_uses_what_lies_on_top_of_its_stack) {
  const Settled settled;
  const at::Tensor callers = tensor_of(1);
  const at::Tensor mine = tensor_of(5);
  REQUIRE(go_out(callers));
  REQUIRE(go_out(mine));
  const auto abs = c10::Dispatcher::singleton().findOp({"aten::abs", ""});
  std::vector<c10::IValue> stack{callers, mine};
  abs->callBoxed(&stack);
  CHECK_EQ(state(callers), "paged_out");
  CHECK_EQ(state(mine), "resident");
  REQUIRE(stack.size() == 2);
  CHECK(holds(stack[1].toTensor(), 5));
}

TEST(two_ops_at_once_find_a_shared_storage_out) {
  const Settled settled;
  at::Tensor tensor = tensor_of(7);
  constexpr int kThreads = 3;
  std::atomic<int> turn{0};
  std::atomic<int> done{0};
  std::atomic<int> wrong{0};
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int seen = 0; !over;) {
        if (turn.load() == seen) {
          std::this_thread::yield();
          continue;
        }
        ++seen;
        at::Tensor own = tensor.view({-1}); // found by its storage alone
        wrong += holds(own, 7) ? 0 : 1;
        ++done;
      }
    });
  }
  int out = 0;
  for (int i = 0; i < 200; ++i) {
    page_out({tensor});
    for (int k = 0; k < 20 && state(tensor) != "paged_out"; ++k) {
      lms().pager.commit_finished();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    out += state(tensor) == "paged_out" ? 1 : 0;
    ++turn;
    while (done.load() < kThreads * turn.load()) {
      std::this_thread::yield();
    }
  }
  over = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK_EQ(wrong.load(), 0);
  CHECK(out > 10); // or nothing has been tested
}

/// Its block is used there, and so is to be kept for it.
TEST(the_stream_is_known_before_what_an_op_of_ops_uses_comes_in) {
  AsyncDevice* device = Program::get().async;
  if (device == nullptr) {
    SKIP("it has no streams");
  }
  const Settled settled;
  const at::Tensor tensor = tensor_of(3, 1024 * 1024).view({1024, 1024});
  REQUIRE(go_out(tensor));
  std::string then = "not known";
  device->when_noted = [&] { then = state(tensor); };
  CHECK_EQ(tensor.square()[0][0].item<int64_t>(), 9);
  device->when_noted = nullptr;
  CHECK_EQ(then, "paged_out");
}

TEST(storages_die_in_every_state) {
  const Settled settled;
  for (int i = 0; i < 40; ++i) {
    at::Tensor tensor = tensor_of(i);
    page_out({tensor});
    if (i % 4 >= 1) {
      lms().manual.wait_pageouts();
    }
    if (i % 4 >= 2) {
      prefetch(tensor);
    }
    if (i % 4 >= 3) {
      lms().manual.wait_pageins();
    }
    tensor = at::Tensor();
  }
  lms().manual.wait_pageouts();
  lms().manual.wait_pageins();
}

TEST(storages_are_resized_in_every_state) {
  const Settled settled;
  for (int i = 0; i < 40; ++i) {
    at::Tensor tensor = tensor_of(i);
    page_out({tensor});
    if (i % 4 >= 1) {
      lms().manual.wait_pageouts();
    }
    if (i % 4 >= 2) {
      prefetch(tensor);
    }
    if (i % 4 >= 3) {
      lms().manual.wait_pageins();
    }
    tensor.resize_({20000});
    CHECK(holds(tensor.slice(0, 0, 8192), i));
    tensor.fill_(i + 1);
    CHECK(go_out(tensor)); // as another entity
    CHECK(holds(tensor, i + 1));
  }
}

TEST(a_storage_that_is_pinned_by_the_program_stays) {
  const Settled settled;
  const at::Tensor tensor = tensor_of(3);
  lms().manual.pin(tensor.storage());
  CHECK_THROWS(page_out({tensor}), PageoutRefused, "pinned");
  lms().manual.unpin(tensor.storage());
  CHECK_THROWS(lms().manual.unpin(tensor.storage()), Error, "pin");
  CHECK(go_out(tensor));
  lms().manual.pin(tensor.storage());
  CHECK_EQ(state(tensor), "resident");
  lms().manual.unpin(tensor.storage());
}

// --- raw addresses -----------------------------------------------------------------------

TEST(a_storage_that_has_been_resized_is_pinned_as_it_is_now) {
  const Settled settled;
  const at::Tensor tensor = tensor_of(1);
  REQUIRE(go_out(tensor));
  CHECK(holds(tensor, 1));
  tensor.resize_({20000}).fill_(2);
  lms().manual.pin(tensor.storage());
  CHECK_THROWS(page_out({tensor}), PageoutRefused, "pinned");
  CHECK_EQ(state(tensor), "resident");
  tensor.resize_({40000}).fill_(3);
  CHECK_THROWS(page_out({tensor}), PageoutRefused, "pinned");
  lms().manual.unpin(tensor.storage());
  CHECK_THROWS(lms().manual.unpin(tensor.storage()), Error, "pin");
  CHECK(go_out(tensor));
  CHECK(holds(tensor, 3));
}

TEST(what_an_op_has_resized_stays_until_the_op_ends) {
  const Settled settled;
  const at::Tensor tensor = tensor_of(1);
  const at::Tensor other = tensor_of(5);
  REQUIRE(go_out(tensor));
  CHECK(holds(tensor, 1));
  REQUIRE(go_out(other)); // so that ops are observed
  {
    const RecordedOp op("aten::add", {tensor});
    tensor.resize_({20000});
    int64_t requested = -1;
    in_threads(1, [&](int) { requested = page_out({tensor}); });
    CHECK_EQ(requested, 0);
    tensor.fill_(2);
  }
  CHECK(go_out(tensor));
  CHECK(holds(tensor, 2));
  CHECK(holds(other, 5));
}

TEST(raw_mutable_access_brings_the_bytes_in_and_keeps_them_until_the_next_op) {
  if (!compat::kHasMaterializer) {
    SKIP("this PyTorch does not tell of it");
  }
  const Settled settled;
  at::Tensor tensor = tensor_of(3);
  for (bool wait : {true, false}) {
    page_out({tensor});
    if (wait) {
      lms().manual.wait_pageouts();
    }
    auto* data = tensor.mutable_data_ptr<int64_t>();
    CHECK_EQ(state(tensor), "resident");
    std::thread other([&] { CHECK_EQ(page_out({tensor}), 0); }); // it is in use
    other.join();
    for (int64_t i = 0; i < tensor.numel(); ++i) {
      data[i] = 4;
    }
    CHECK(holds(tensor, 4)); // ends it
    CHECK(go_out(tensor));
    CHECK(holds(tensor, 4));
    tensor.fill_(3);
  }
}

TEST(a_const_address_of_what_is_out_reads_the_bytes) {
  const Settled settled;
  const at::Tensor tensor = tensor_of(9);
  REQUIRE(go_out(tensor));
  const auto* data = tensor.const_data_ptr<int64_t>();
  CHECK_EQ(data[0], 9);
  CHECK_EQ(data[8191], 9);
  CHECK_EQ(state(tensor), "paged_out");
}

TEST(storages_that_are_held_stay_and_come_in) {
  const Settled settled;
  const at::Tensor tensor = tensor_of(9);
  REQUIRE(go_out(tensor));
  Pinned held;
  lms().addresses.hold({tensor.storage()}, held);
  CHECK_EQ(state(tensor), "resident");
  CHECK_EQ(page_out({tensor}), 0);
  lms().addresses.release(held);
  CHECK(go_out(tensor));
}

// --- records -------------------------------------------------------------------------------

class SymbolicSize final : public c10::SymNodeImpl {
 public:
  bool is_int() override {
    return true;
  }
};

at::Tensor with_symbolic_size() {
  const c10::SymInt nbytes(c10::SymNode(c10::make_intrusive<SymbolicSize>()));
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      nbytes,
      c10::DataPtr(nullptr, c10::Device(c10::kCPU)),
      nullptr,
      /*resizable=*/false);
  return at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)),
      c10::DispatchKeySet(c10::DispatchKey::CPU),
      caffe2::TypeMeta::Make<float>());
}

TEST(a_storage_without_a_size_is_no_entity) {
  const Settled settled;
  const at::Tensor symbolic = with_symbolic_size();
  CHECK_THROWS(page_out({symbolic}), PageoutRefused, "symbolic");
  at::Tensor tensor = tensor_of(4);
  REQUIRE(go_out(tensor));
  {
    RecordedOp op("some::op", {tensor, symbolic, c10::List<at::Tensor>({symbolic, tensor})});
    CHECK_EQ(state(tensor), "resident");
    CHECK_EQ(page_out({tensor}), 0);
  }
  CHECK_EQ(lms().manual.state(symbolic.storage()), "resident");
  check_nothing_is_pinned();
  CHECK(go_out(tensor));
}

TEST(an_op_without_room_works_in_place_and_nothing_comes_in_beside_it) {
  const Settled settled;
  const at::Tensor tensor = tensor_of(1, 65536);
  REQUIRE(go_out(tensor));
  {
    const NoMemory none(4096);
    RecordedOp op("some::op", {tensor});
    CHECK_EQ(state(tensor), "paged_out");
    CHECK(lms().pager.stats().host_served.load() > 0);
    in_threads(2, [&](int) {
      CHECK_EQ(prefetch(tensor), 0);
      RecordedOp other("some::op", {tensor});
      CHECK_EQ(state(tensor), "paged_out");
    });
  }
  check_nothing_is_pinned();
  CHECK(holds(tensor, 1));
  CHECK_EQ(state(tensor), "resident");
}

TEST(threads_without_room_add_up_in_one_copy) {
  const Settled settled;
  const size_t held_bytes = Program::get().device().use().allocated_bytes;
  at::Tensor tensor = tensor_of(0, 65536);
  std::mutex adding;
  int64_t added = 0;
  std::atomic<bool> over{false};
  std::thread pager([&] {
    while (!over) {
      page_out({tensor});
      for (int i = 0; i < 5; ++i) {
        lms().pager.commit_finished();
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    }
  });
  // Its block is given back a moment after it is out.
  while (state(tensor) != "paged_out" ||
         Program::get().device().use().allocated_bytes > held_bytes + tensor.nbytes() / 2) {
    go_out(tensor);
  }
  {
    const NoMemory little(4096);
    in_threads(3, [&](int t) {
      for (int i = 0; i < 100000 && lms().pager.stats().host_served < 50; ++i) {
        std::this_thread::yield();
        RecordedOp op("some::op", {tensor}); // pins it and brings it, or not
        std::lock_guard<std::mutex> lock(adding);
        // Raw, as a kernel: the address is the op's until it ends.
        auto* data = static_cast<int64_t*>(const_cast<void*>(tensor.const_data_ptr()));
        data[(i * 3 + t) % tensor.numel()] += 1;
        ++added;
      }
    });
  }
  over = true;
  pager.join();
  lms().manual.wait_pageouts();
  CHECK_EQ(tensor.sum().item<int64_t>(), added);
  CHECK(lms().pager.stats().host_served.load() > 0); // or nothing has been tested
  CHECK(lms().pager.stats().pageouts.load() > 0);
}

TEST(observers_come_and_go_while_ops_run) {
  const Settled settled;
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      at::Tensor own = tensor_of(t);
      for (int64_t i = 0; !over; ++i) {
        own.add_(1);
        if (!holds(own, t + i + 1)) {
          CHECK(false);
          return;
        }
      }
    });
  }
  const at::Tensor tensor = tensor_of(3);
  for (int i = 0; i < 150; ++i) {
    page_out({tensor});
    lms().manual.wait_pageouts();
    CHECK(holds(tensor, 3));
    lms().callbacks.stop_if_idle();
  }
  over = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(other_observers_of_the_program_see_their_pairs) {
  const Settled settled;
  static std::atomic<int> depth{0};
  static thread_local int own_depth = 0;
  const auto handle = at::addGlobalCallback(
      at::RecordFunctionCallback(
          [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> {
            ++own_depth;
            ++depth;
            return nullptr;
          },
          [](const at::RecordFunction&, at::ObserverContext*) {
            --own_depth;
            --depth;
          }));
  in_threads(2, [&](int t) {
    at::Tensor tensor = tensor_of(t);
    for (int i = 0; i < 50; ++i) {
      CHECK(go_out(tensor) || true);
      CHECK(holds(tensor, t));
    }
    CHECK_EQ(own_depth, 0);
  });
  at::removeCallback(handle);
  CHECK_EQ(depth.load(), 0);
}

} // namespace
} // namespace torch_lms
