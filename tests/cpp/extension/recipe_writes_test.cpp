// What ops in place have written is dropped, and made again by the op that made it and by those
// that wrote to it.

#include <ATen/ops/dropout.h>

#include "made.h"

namespace torch_lms {
namespace {

TEST(what_was_written_in_place_comes_back_as_it_was_written) {
  const Observed observed;
  const at::Tensor input = tensor_of(-3);
  const Made made = made_by([&] { return input.mul(5); });
  const Made written = then(made, [](at::Tensor tensor) { return tensor.relu_(); });
  CHECK(!made.drop());
  for (int i = 1; i < 3; ++i) {
    REQUIRE(written.drop());
    CHECK_EQ(state(made.tensor), "dropped");
    CHECK(holds(made.tensor, 0));
    CHECK_EQ(recomputations(), i);
  }
}

TEST(a_chain_of_writes_is_run_again_from_the_op_that_made_it) {
  const Observed observed;
  const at::Tensor input = tensor_of(-3);
  const at::Tensor other = tensor_of(7);
  Made made = made_by([&] { return input.mul(5); });
  made = then(made, [&](at::Tensor tensor) { return tensor.add_(other); });
  made = then(made, [](at::Tensor tensor) { return tensor.relu_(); });
  made = then(made, [](at::Tensor tensor) { return tensor.sub_(1); });
  REQUIRE(made.drop());
  REQUIRE(go_out(other));
  CHECK(holds(made.tensor, -1));
  CHECK_EQ(state(other), "resident");
  CHECK(holds(input, -3));
}

TEST(a_write_to_a_part_is_run_again_on_that_part) {
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  const Made made = made_by([&] { return input.mul(5); });
  const auto part = [](const at::Tensor& tensor) {
    return tensor.view({64, 128}).slice(1, 5, 77, 3).t();
  };
  const Made written = then(made, [&](const at::Tensor& tensor) { return part(tensor).add_(1); });
  const at::Tensor expected = made.tensor.clone();
  REQUIRE(written.drop());
  CHECK(holds(part(made.tensor), 16));
  CHECK(at::equal(made.tensor, expected));
}

TEST(it_comes_back_before_what_any_of_its_ops_reads_is_written) {
  const Observed observed;
  for (const bool earlier : {true, false}) {
    const at::Tensor inputs[] = {tensor_of(3), tensor_of(4)};
    const Made made = made_by([&] { return inputs[0].mul(5); });
    const Made written = then(made, [&](at::Tensor tensor) { return tensor.add_(inputs[1]); });
    REQUIRE(written.drop());
    inputs[earlier ? 0 : 1].zero_();
    CHECK_EQ(state(made.tensor), "resident");
    CHECK(holds(made.tensor, 19));
    CHECK(!written.drop());
  }
}

TEST(what_the_earlier_op_reads_is_not_to_be_written_before_the_later_one) {
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  const Made made = made_by([&] { return input.mul(5); });
  input.zero_();
  CHECK(then(made, [](at::Tensor tensor) { return tensor.add_(1); }).recipe == nullptr);
}

TEST(a_write_to_what_has_been_dropped_brings_it_back_and_makes_a_longer_recipe) {
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  Made made = made_by([&] { return input.mul(5); });
  for (int i = 1; i <= 3; ++i) {
    REQUIRE(made.drop());
    made = then(made, [](at::Tensor tensor) { return tensor.add_(1); });
    CHECK_EQ(state(made.tensor), "resident");
    CHECK(holds(made.tensor, 15 + i));
  }
}

TEST(a_write_that_nobody_has_noted_ends_the_chain) {
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  const Made made = made_by([&] { return input.mul(5); });
  made.tensor.add_(1);
  const Made written = then(made, [](at::Tensor tensor) { return tensor.add_(1); });
  CHECK(written.recipe == nullptr);
  CHECK(holds(made.tensor, 17));
}

TEST(what_reads_what_it_writes_has_no_recipe) {
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  const Made made = made_by([&] { return input.mul(5); });
  CHECK(then(made, [](at::Tensor tensor) { return tensor.mul_(tensor); }).recipe == nullptr);
  const Made other = made_by([&] { return input.mul(5); });
  const auto halves = [](const at::Tensor& tensor) {
    return tensor.slice(0, 0, 4096).add_(tensor.slice(0, 4096));
  };
  CHECK(then(other, halves).recipe == nullptr);
}

TEST(a_write_of_chance_or_without_an_earlier_recipe_has_none) {
  const Observed observed;
  const at::Tensor input = at::ones({4096});
  const auto none_after = [&](const auto& op) {
    return then(made_by([&] { return input.mul(5); }), op).recipe == nullptr;
  };
  const auto bernoulli =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::bernoulli_", "float");
  CHECK(none_after([&](const at::Tensor& tensor) {
    std::vector<c10::IValue> stack{tensor, 0.5, c10::IValue()};
    bernoulli.callBoxed(&stack);
    return stack[0].toTensor();
  }));
  CHECK(none_after([](at::Tensor tensor) { return at::dropout_(tensor, 0.5, true); }));
  CHECK(none_after([](at::Tensor tensor) { return tensor.t_(); }));
  CHECK(made_by([&] { return input.add_(1); }).recipe == nullptr);
}

TEST(chains_of_writes_have_an_end) {
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  Made made = made_by([&] { return input.mul(5); });
  for (size_t i = 1; i < OpRecipe::kMostSteps; ++i) {
    made = then(made, [](at::Tensor tensor) { return tensor.add_(1); });
  }
  REQUIRE(made.drop());
  CHECK(holds(made.tensor, 15 + static_cast<int64_t>(OpRecipe::kMostSteps) - 1));
  CHECK(then(made, [](at::Tensor tensor) { return tensor.add_(1); }).recipe == nullptr);
}

TEST(what_it_was_written_from_is_kept_as_long_as_it_is_dropped) {
  const Observed observed;
  at::Tensor other = tensor_of(4);
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(other.storage().unsafeGetStorageImpl()));
  Made made = made_by([] { return tensor_of(3).mul(5); });
  made = then(made, [&](at::Tensor tensor) { return tensor.add_(other); });
  REQUIRE(made.drop());
  made.recipe = nullptr;
  other = at::Tensor();
  CHECK(!storage.expired());
  CHECK(holds(made.tensor, 19));
  CHECK(storage.expired());
}

TEST(writes_and_drops_of_threads_lose_nothing) {
  const Observed observed;
  for (int round = 0; round < 200; ++round) {
    const at::Tensor input = tensor_of(3);
    const at::Tensor other = tensor_of(4);
    const Made made = made_by([&] { return input.mul(5); });
    in_threads(2, [&](int thread) {
      if (thread == 0) {
        input.add_(1);
      } else {
        then(made, [&](at::Tensor tensor) { return tensor.add_(other); }).drop();
      }
    });
    CHECK(holds(made.tensor, 19));
    CHECK(holds(input, 4));
  }
}

TEST(every_thread_that_writes_to_what_it_is_made_from_waits_until_it_is_back) {
  const Observed observed;
  for (int round = 0; round < 10; ++round) {
    const at::Tensor input = tensor_of(3).view({2, 4096});
    const at::Tensor other = at::ones({4096, 1024}, at::kLong);
    const Made made = made_by([&] { return input.mm(other); });
    REQUIRE(made.drop());
    in_threads(2, [&](int thread) { input.select(0, thread).add_(1); });
    CHECK(holds(made.tensor, 3 * 4096));
    CHECK(holds(input, 4));
  }
}

/// Of a stream, which others can be ordered after while it has work to do.
struct Work final : Fence {
  bool done() noexcept override {
    return over.load();
  }
  void wait() override {}

  std::atomic<bool> over{false};
};

TEST(a_write_is_ordered_after_what_another_stream_makes_again_from_the_same_storage) {
  AsyncBackend& backend = *fake_device("it has no streams").async;
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  const Made made = made_by([&] { return input.mul(5); });
  REQUIRE(made.drop());
  const auto work = std::make_shared<Work>();
  backend.submitted = [&] { return work; };
  lms().pager.bring_in(made.entity);
  backend.submitted = nullptr;
  int ordered = 0;
  backend.instead_of_order = [&] { ++ordered; };
  input.add_(1);
  backend.instead_of_order = nullptr;
  work->over = true;
  CHECK(ordered > 0);
  CHECK(holds(made.tensor, 15));
}

/// Whether `made`, written by ops of two threads at once, each in a part of its own, keeps both
/// writes, and nothing of it can be made again. `prepare`: the other's write within the first op.
bool keeps_writes_at_once(const Made& made, const std::function<void(NextRecipe&)>& prepare) {
  at::Tensor part = made.tensor.slice(0, 4096);
  const Made written = made_by([&] { return part.add_(1); }, prepare);
  const bool dropped = written.drop();
  const Made later = then(made, [](at::Tensor tensor) { return tensor.add_(1); });
  return !dropped && later.recipe == nullptr && holds(made.tensor.slice(0, 0, 4096), 18) &&
         holds(part, 17);
}

TEST(what_another_thread_writes_while_an_op_writes_is_not_lost) {
  const Observed observed;
  const at::Tensor input = tensor_of(3);
  for (const bool noted : {false, true}) {
    for (const bool captured : {false, true}) {
      const Made made = made_by([&] { return input.mul(5); });
      Made others;
      const auto write = [&] {
        in_threads(1, [&](int) {
          const auto op = [&] { return made.tensor.slice(0, 0, 4096).add_(2); };
          if (noted) {
            others = made_by(op);
          } else {
            op();
          }
        });
      };
      CHECK(keeps_writes_at_once(made, [&](NextRecipe& next) {
        if (captured) {
          next.at_begin([&](const OpRecipe&) { write(); });
        } else {
          next.before_capture(write);
        }
      }));
      CHECK(!others.drop());
    }
  }
}

TEST(an_op_is_auditioned_on_what_it_has_overwritten) {
  const Observed observed;
  Audition audition;
  const at::Tensor input = tensor_of(3);
  const Made made = made_by([&] { return input.mul(5); });
  c10::Storage before;
  Made written;
  {
    NextRecipe next;
    next.at_begin([&](const OpRecipe& recipe) { before = audition.copy_overwritten(recipe); });
    written.tensor = made.tensor.slice(0, 3, 5000).add_(1);
    written.recipe = next.take();
  }
  REQUIRE(written.recipe != nullptr);
  REQUIRE(static_cast<bool>(before));
  CHECK_EQ(audition.try_out(*written.recipe, {written.tensor}, before), "");
  CHECK(!audition.copy_overwritten(*written.recipe)); // known by now
  CHECK_EQ(audition.try_out(*written.recipe, {written.tensor}, c10::Storage()), "");
  Audition other;
  CHECK(!other.try_out(*written.recipe, {written.tensor}, c10::Storage()).empty());
  CHECK(!other.try_out(*written.recipe, {written.tensor}, made.tensor.clone().storage()).empty());
}

} // namespace
} // namespace torch_lms
