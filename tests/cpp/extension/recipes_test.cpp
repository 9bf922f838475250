// Storages that are dropped and made again: in chains, before what they are made from is written,
// by several threads at once, and where their op fails.

#include <ATen/ops/_weight_norm_interface.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_dropout.h>
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

/// Ops are observed from before anything is dropped.
struct Observed {
  Settled settled;
  Observer::Request request{lms().observer};
};

int64_t recomputations() {
  return lms().pager.stats().recomputations.load();
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

TEST(a_long_chain_is_made_again_from_its_beginning) {
  const Observed observed;
  at::Tensor first = tensor_of(1);
  std::vector<Made> chain;
  for (int i = 0; i < 3000; ++i) {
    const at::Tensor& before = chain.empty() ? first : chain.back().tensor;
    chain.push_back(made_by([&] { return before.slice(0, 0, 256).add(1); }));
    if (chain.size() > 1) {
      REQUIRE(chain[chain.size() - 2].drop());
    }
  }
  REQUIRE(chain.back().drop());
  for (Made& made : chain) { // nobody else keeps what lies between
    made.recipe = nullptr;
    if (&made != &chain.back()) {
      made.tensor = at::Tensor();
    }
  }
  CHECK(holds(chain.back().tensor, 3001));
  CHECK_EQ(recomputations(), 3000);
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

struct DroppedOut {
  Made made;
  at::Tensor mask;
  bool finished;
};

DroppedOut drop_out(const at::Tensor& input, double p, c10::optional<bool> train) {
  DroppedOut found;
  {
    NextRecipe next;
    std::tie(found.made.tensor, found.mask) = at::native_dropout(input, p, train);
    found.made.recipe = next.take();
  }
  const auto track = [](const at::Tensor& tensor) {
    c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
    return lms().pager.find_or_track(storage, /*by_hand=*/true);
  };
  found.made.entity = track(found.made.tensor);
  track(found.mask);
  const std::vector<at::Tensor> both{found.made.tensor, found.mask};
  found.finished = lms().recipes.finish(found.made.recipe, both);
  if (found.finished) {
    const auto storages = lms().recipes.note_made(found.made.recipe, both);
    found.finished = storages[0] != nullptr && storages[1] == nullptr;
  }
  return found;
}

TEST(what_dropout_made_comes_back_from_its_mask) {
  const Observed observed;
  const at::Tensor input = tensor_of(3).to(at::kFloat);
  const DroppedOut found = drop_out(input, 0.3, c10::nullopt);
  REQUIRE(found.finished);
  const at::Tensor expected = found.made.tensor.clone();
  CHECK(!at::equal(expected, input));
  for (int i = 0; i < 2; ++i) {
    REQUIRE(found.made.drop());
    CHECK_EQ(state(found.made.tensor), "dropped");
    CHECK(at::equal(found.made.tensor, expected));
  }
  REQUIRE(found.made.drop());
  found.mask.logical_not_();
  CHECK_EQ(state(found.made.tensor), "resident"); // before the write
  CHECK(at::equal(found.made.tensor, expected));
  CHECK(!found.made.drop());
}

TEST(dropout_that_draws_nothing_is_no_recipe) {
  const Observed observed;
  const at::Tensor input = tensor_of(3).to(at::kFloat);
  CHECK(!drop_out(input, 0.0, true).finished);
  CHECK(!drop_out(input, 1.0, true).finished);
  CHECK(!drop_out(input, 0.5, false).finished);
}

TEST(what_nobody_has_observed_for_a_while_is_not_dropped) {
  const Settled settled;
  const at::Tensor input = tensor_of(3);
  Made made;
  {
    const Observer::Request request{lms().observer};
    made = made_by([&] { return input.mul(5); });
  }
  lms().observer.stop_if_idle();
  REQUIRE(!lms().observer.observing());
  made.tensor.add_(1);
  const Observer::Request request{lms().observer};
  CHECK(!made.drop());
  CHECK(holds(made.tensor, 16));
}

TEST(it_comes_back_before_what_it_is_made_from_is_written_through_an_address) {
  if (!compat::kHasMaterializer) {
    return; // nothing tells of that
  }
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  lms().pager.find_or_track(*input.storage().unsafeGetStorageImpl(), /*by_hand=*/true);
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
  lms().pager.keep_copies(true); // so that writes to what comes in are watched for
  REQUIRE(go_out(direction));
  CHECK_EQ(direction.sum().item<float>(), 64 * 64);
  lms().manual.pagein_all();
  CHECK_EQ(state(made.tensor), "resident");
  CHECK(at::equal(made.tensor, expected));
  lms().pager.keep_copies(false);
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
