// Storages that are dropped and made again: before what they are made from is written, by several
// threads at once, and where their op fails.

#include <atomic>
#include <thread>

#include <ATen/ops/_weight_norm_interface.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/rand_like.h>
#include <c10/core/DefaultDtype.h>
#include <entity/Error.h>
#include <extension/base/Compat.h>
#include <torch/library.h>

#include "made.h"

namespace torch_lms {
namespace {

at::Tensor twice(const at::Tensor& tensor) {
  return tensor.mul(2);
}

TORCH_LIBRARY(lms_test, library) {
  library.def("twice(Tensor self) -> Tensor", &twice);
}

at::Tensor call_twice(const at::Tensor& tensor) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("lms_test::twice", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(tensor);
}

TEST(what_has_been_dropped_comes_back_with_the_next_op) {
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  const Made made = made_by([&] { return input.mul(5); });
  REQUIRE(made.drop());
  CHECK_EQ(state(made.tensor), "dropped");
  CHECK(!made.drop());
  CHECK(holds(made.tensor, 15));
  CHECK_EQ(state(made.tensor), "resident");
  CHECK_EQ(recomputations(), 1);
  CHECK(go_out(made.tensor)); // as any other
  CHECK(holds(made.tensor, 15));
}

TEST(a_view_of_what_has_been_dropped_moves_nothing_until_it_is_read) {
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  const Made made = made_by([&] { return input.mul(5); });
  REQUIRE(made.drop());
  const at::Tensor view = made.tensor.view({64, 128}).select(0, 3).t();
  CHECK_EQ(state(made.tensor), "dropped");
  CHECK(holds(view, 15));
}

TEST(what_it_is_made_from_may_have_left_the_device) {
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  const Made made = made_by([&] { return input.mul(5); });
  REQUIRE(made.drop());
  REQUIRE(go_out(input));
  CHECK(holds(made.tensor, 15));
  CHECK_EQ(state(input), "resident");
}

TEST(it_comes_back_before_what_it_is_made_from_is_written) {
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  const Made made = made_by([&] { return input.mul(5); });
  REQUIRE(made.drop());
  input.add_(1);
  CHECK_EQ(state(made.tensor), "resident");
  CHECK(holds(made.tensor, 15));
  CHECK(holds(input, 4));
  CHECK(!made.drop()); // it cannot be made again any more
}

TEST(a_loose_recipe_keeps_what_it_reads_from_the_drop_on) {
  const Observed observed;
  at::Tensor input = tensor_of(3);
  const c10::weak_intrusive_ptr<c10::StorageImpl> read = input.storage().getWeakStorageImpl();
  const Made made = made_loosely_by([&] { return input.mul(5); });
  CHECK_EQ(read.use_count(), 1U);
  REQUIRE(made.drop());
  input.reset();
  CHECK(!read.expired());
  CHECK(holds(made.tensor, 15));
  CHECK(read.expired());
  CHECK(!made.drop()); // what it is made from has gone
  CHECK(holds(made.tensor, 15));
}

TEST(what_a_loose_recipe_made_comes_back_before_what_it_is_made_from_is_written) {
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  const Made made = made_loosely_by([&] { return input.mul(5); });
  REQUIRE(made.drop());
  input.add_(1);
  CHECK_EQ(state(made.tensor), "resident");
  CHECK(holds(made.tensor, 15));
  CHECK(!made.drop());
}

TEST(what_has_been_written_without_an_op_is_not_dropped) {
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  const Made made = made_by([&] { return input.mul(5); });
  static_cast<int64_t*>(made.tensor.storage().mutable_data())[0] = 7;
  CHECK(!compat::kHasMaterializer || !made.drop());
}

TEST(a_write_to_what_an_earlier_recipe_at_its_address_has_read_does_not_bring_it_back) {
  const Observed observed;
  const at::Tensor other = tensor_of(4);
  const at::Tensor input = tensor_of(3);
  const OpRecipe* earlier = made_by([&] { return other.mul(5); }).recipe.get(); // dead by now
  std::vector<Made> made;
  do {
    made.push_back(made_by([&] { return input.mul(5); }));
  } while (made.back().recipe.get() != earlier && made.size() < 100);
  if (made.back().recipe.get() != earlier) {
    return; // memory that is freed is not used again: under a sanitizer
  }
  REQUIRE(made.back().drop());
  other.add_(1);
  CHECK_EQ(state(made.back().tensor), "dropped");
}

TEST(what_nobody_has_observed_for_a_while_is_not_dropped) {
  const Settled settled;
  const at::Tensor input = tensor_of(3);
  Made made;
  {
    const OpCallbacks::Request request{lms().callbacks};
    made = made_by([&] { return input.mul(5); });
  }
  lms().callbacks.stop_if_idle();
  REQUIRE(!lms().callbacks.observing());
  made.tensor.add_(1);
  const OpCallbacks::Request request{lms().callbacks};
  CHECK(!made.drop());
  CHECK(holds(made.tensor, 16));
}

TEST(it_comes_back_before_what_it_is_made_from_is_written_through_an_address) {
  if (!compat::kHasMaterializer) {
    return; // nothing tells of that
  }
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  tracked(input);
  const Made made = made_by([&] { return input.mul(5); });
  REQUIRE(made.drop());
  input.mutable_data_ptr<int64_t>()[0] = 8;
  CHECK_EQ(state(made.tensor), "resident");
  CHECK(holds(made.tensor, 15));
}

TEST(a_raw_address_of_what_has_been_dropped_has_the_bytes) {
  if (!compat::kHasMaterializer) {
    return;
  }
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  const Made made = made_by([&] { return input.mul(5); });
  REQUIRE(made.drop());
  CHECK_EQ(made.tensor.mutable_data_ptr<int64_t>()[7], 15);
}

TEST(it_can_be_written_itself) {
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  const Made made = made_by([&] { return input.mul(5); });
  REQUIRE(made.drop());
  made.tensor.add_(1);
  CHECK(holds(made.tensor, 16));
  CHECK(!made.drop());
}

TEST(what_it_is_made_from_is_kept_as_long_as_it_is_dropped) {
  const Observed observed;
  at::Tensor input = tensor_of(3);
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(input.storage().unsafeGetStorageImpl()));
  Made made = made_by([&] { return input.mul(5); });
  REQUIRE(made.drop());
  made.recipe = nullptr;
  input = at::Tensor();
  CHECK(!storage.expired());
  CHECK(holds(made.tensor, 15));
  CHECK(storage.expired());
}

TEST(an_op_that_takes_the_addresses_of_what_it_reads_can_be_run_again) {
  const Observed observed;
  const at::Tensor direction = at::ones({64, 64}, at::kFloat);
  const at::Tensor length = at::full({64, 1}, 2, at::kFloat);
  const Made made =
      made_by([&] { return std::get<0>(at::_weight_norm_interface(direction, length, 0)); });
  const at::Tensor expected = made.tensor.clone();
  REQUIRE(made.drop());
  lms().pager.kept_copies().keep(true); // so that writes to what comes in are watched for
  REQUIRE(go_out(direction));
  CHECK_EQ(direction.sum().item<float>(), 64 * 64);
  lms().manual.pagein_all();
  CHECK_EQ(state(made.tensor), "resident");
  CHECK(at::equal(made.tensor, expected));
  end_keeping();
}

TEST(what_is_dropped_is_made_again_before_its_inputs_are_not_watched_any_more) {
  AsyncDevice* device = Program::get().async;
  if (device == nullptr || !compat::kHasMaterializer) {
    SKIP("it needs a device that can say when, and a PyTorch that tells of writes");
  }
  const Observed observed;
  const KeepsCopies keeps;
  const at::Tensor input = kept_tensor(3);
  const Made made = made_by([&] { return input.mul(5); });
  REQUIRE(made.drop());
  const at::Tensor other = tensor_of(7);
  REQUIRE(go_out(other));
  const auto watched = [&input] {
    return compat::block_is_watched(*input.storage().unsafeGetStorageImpl());
  };
  bool watched_meanwhile = false;
  bool has_hole = false;
  device->has_hole = [&](size_t) { // for the other one, which comes in with what is dropped
    watched_meanwhile = watched();
    return has_hole;
  };
  CHECK_THROWS(lms().disable(), NoRoom, "no hole");
  CHECK(watched()); // something may still be dropped
  has_hole = true;
  lms().disable();
  device->has_hole = nullptr;
  CHECK(watched_meanwhile);
  CHECK(!watched());
  CHECK_EQ(state(made.tensor), "resident");
  CHECK(holds(made.tensor, 15));
}

TEST(what_dies_dropped_leaves_nothing) {
  const Observed observed;
  at::Tensor input = tensor_of(3);
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(input.storage().unsafeGetStorageImpl()));
  {
    Made made = made_by([&] { return input.mul(5); });
    REQUIRE(made.drop());
  }
  input = at::Tensor();
  CHECK(storage.expired());
  CHECK_EQ(lms().pager.paged_out_storages(), 0);
}

TEST(an_op_gets_the_error_of_what_cannot_be_made_and_can_try_again) {
  const Observed observed;
  const at::Tensor input = tensor_of(3, 65536);
  const Made made = made_by([&] { return input.mul(5); });
  REQUIRE(made.drop());
  {
    const NoMemory none(4096);
    CHECK_THROWS(made.tensor.add_(1), c10::Error, "no room in a test");
    CHECK_EQ(state(made.tensor), "dropped");
  }
  if (compat::kHasMaterializer) { // else PyTorch goes on refusing it
    CHECK(holds(made.tensor, 15));
  }
}

TEST(it_is_made_with_the_switches_of_its_first_time) {
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  const Made made = made_by([&] { return input.true_divide(2); }); // of the default dtype
  REQUIRE(made.drop());
  c10::set_default_dtype(c10::scalarTypeToTypeMeta(at::kDouble));
  const bool right = made.tensor.eq(1.5).all().item<bool>();
  CHECK_EQ(c10::get_default_dtype_as_scalartype(), at::kDouble);
  c10::set_default_dtype(c10::scalarTypeToTypeMeta(at::kFloat));
  CHECK(right);
}

TEST(it_is_made_with_the_lists_of_its_first_time) {
  const Observed observed;
  const at::Tensor input = tensor_of(3).view({64, 128});
  c10::List<int64_t> dimensions({0});
  const auto sum = c10::Dispatcher::singleton().findSchemaOrThrow("aten::sum", "dim_IntList");
  const Made made = made_by([&] {
    std::vector<c10::IValue> stack{input, dimensions, false, c10::IValue()};
    sum.callBoxed(&stack);
    return stack[0].toTensor();
  });
  REQUIRE(made.drop());
  dimensions.set(0, 1);
  CHECK(holds(made.tensor, 3 * 64));
}

TEST(what_others_may_write_to_makes_no_recipe) {
  const Observed observed;
  std::vector<int64_t> theirs(8192, 3);
  const at::Tensor input = at::from_blob(theirs.data(), {8192}, at::kLong);
  CHECK(made_by([&] { return input.mul(5); }).recipe == nullptr);
  const at::Tensor pinned = tensor_of(3);
  lms().manual.pin(pinned.storage());
  CHECK(made_by([&] { return pinned.mul(5); }).recipe == nullptr);
  lms().manual.unpin(pinned.storage());
  CHECK(made_by([&] { return call_twice(pinned); }).recipe == nullptr); // somebody else's op
}

/// Who lets go of the last reference but Python's needs Python's lock: not under the mutex.
TEST(who_drops_it_holds_it_until_the_mutex_is_free) {
  AsyncDevice* device = Program::get().async;
  if (device == nullptr) {
    SKIP("it does not tell");
  }
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  const Made made = made_by([&] { return input.mul(5); });
  size_t owners = 0;
  device->when_used_by_streams = [&] { owners = made.tensor.storage().use_count(); };
  REQUIRE(made.drop());
  CHECK_EQ(owners, 2);
  CHECK_EQ(made.tensor.storage().use_count(), 1);
  CHECK(holds(made.tensor, 15));
}

/// Its block is a new one, of which no stream but the recipe's is known to use it.
TEST(what_is_made_again_is_kept_for_the_streams_that_may_use_it) {
  AsyncDevice* device = Program::get().async;
  if (device == nullptr) {
    SKIP("it does not tell");
  }
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  const Made made = made_by([&] { return input.mul(5); });
  REQUIRE(made.drop());
  bool kept = false;
  device->when_used_by_streams = [&] { kept = true; };
  CHECK(holds(made.tensor, 15));
  CHECK(kept);
}

TEST(what_runs_inside_of_an_op_finds_it) {
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  const Made made = made_by([&] { return input.mul(5); });
  REQUIRE(made.drop());
  const RecordedOp op("aten::add", {input});
  CHECK(holds(made.tensor, 15)); // as a hook of Python's
}

TEST(threads_that_need_it_at_once_find_it_made_once) {
  const Observed observed;
  for (int round = 0; round < 50; ++round) {
    const at::Tensor input = tensor_of(round);
    const Made between = made_by([&] { return input.mul(5); });
    const Made made = made_by([&] { return between.tensor.add(1); });
    REQUIRE(between.drop());
    REQUIRE(made.drop());
    const int64_t before = recomputations();
    in_threads(4, [&](int thread) {
      CHECK(holds(thread % 2 == 0 ? made.tensor : between.tensor, 5 * round + 1 - thread % 2));
    });
    CHECK_EQ(recomputations() - before, 2);
  }
}

TEST(a_write_and_a_drop_at_once_lose_nothing) {
  const Observed observed;
  for (int round = 0; round < 200; ++round) {
    const at::Tensor input = tensor_of(3);
    const Made made = made_by([&] { return input.mul(5); });
    in_threads(2, [&](int thread) {
      if (thread == 0) {
        input.add_(1);
      } else {
        made.drop();
      }
    });
    CHECK(holds(made.tensor, 15));
    CHECK(holds(input, 4));
  }
}

TEST(what_has_been_made_again_and_gone_out_stays_out_when_what_it_was_made_from_is_written) {
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  const Made made = made_by([&] { return input.mul(5); });
  REQUIRE(made.drop());
  REQUIRE(holds(made.tensor, 15));
  REQUIRE(go_out(made.tensor));
  input.zero_();
  CHECK_EQ(state(made.tensor), "paged_out");
  CHECK(holds(made.tensor, 15));
}

TEST(it_stays_while_it_is_made_for_who_does_not_use_it) {
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  Made made = made_by([&] { return input.mul(5); });
  REQUIRE(made.drop());
  KeepAlive last = made.entity->hold();
  made.tensor = at::Tensor();
  std::atomic<bool> let_go{false};
  std::thread owner;
  {
    const Asked asked(SIZE_MAX, [&](Device&, size_t nbytes) {
      if (nbytes < made.entity->nbytes()) {
        return true; // the factor
      }
      CHECK(!owner.joinable());
      owner = std::thread([&] {
        last = nullptr;
        let_go = true;
      });
      while (!let_go && !made.entity->gone()) {
      }
      CHECK(!made.entity->gone());
      return true;
    });
    input.zero_(); // what reads it comes back
  }
  REQUIRE(owner.joinable());
  owner.join();
  CHECK(made.entity->gone());
  CHECK_EQ(recomputations(), 1);
  CHECK(holds(input, 0));
}

TEST(the_end_of_paging_brings_it_back) {
  const at::Tensor input = tensor_of(3);
  Made made;
  {
    const Observed observed;
    made = made_by([&] { return input.mul(5); });
    REQUIRE(made.drop());
  }
  CHECK_EQ(state(made.tensor), "resident");
  CHECK(holds(made.tensor, 15));
}

TEST(what_chance_or_nobody_has_filled_has_no_recipe) {
  const Observed observed;
  const at::Tensor input = at::ones({4096});
  CHECK(made_by([&] { return at::rand_like(input); }).recipe == nullptr);
  CHECK(made_by([&] { return at::empty_like(input); }).recipe == nullptr);
}

} // namespace
} // namespace torch_lms
