// Ops that are run again by rules of their own: batch norm, dropout from its mask, and what makes
// no plain tensor.

#include <ATen/ops/dropout.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/quantize_per_tensor.h>

#include "made.h"

namespace torch_lms {
namespace {

struct Normalized {
  at::Tensor input = at::linspace(-3, 3, 4096).view({64, 64});
  at::Tensor mean = at::full({64}, 0.25);
  at::Tensor variance = at::full({64}, 2.0);

  Made made(bool training) const {
    return made_by([&] {
      return std::get<0>(at::native_batch_norm(input, {}, {}, mean, variance, training, 0.1, 1e-5));
    });
  }
};

TEST(batch_norm_that_trains_leaves_its_statistics_alone_when_it_is_run_again) {
  const Observed observed;
  const Normalized norm;
  const Made made = norm.made(/*training=*/true);
  const at::Tensor mean = norm.mean.clone();
  const at::Tensor variance = norm.variance.clone();
  CHECK(!at::equal(mean, at::full({64}, 0.25)));
  const Made written = then(made, [](at::Tensor tensor) { return tensor.relu_(); });
  const at::Tensor expected = made.tensor.clone();
  REQUIRE(written.drop());
  CHECK(at::equal(made.tensor, expected));
  CHECK(at::equal(norm.mean, mean));
  CHECK(at::equal(norm.variance, variance));
  REQUIRE(written.drop());
  norm.mean.zero_(); // nothing depends on them
  CHECK_EQ(state(made.tensor), "dropped");
  CHECK(at::equal(made.tensor, expected));
}

TEST(batch_norm_that_does_not_train_is_made_again_from_its_statistics) {
  const Observed observed;
  const Normalized norm;
  const Made made = norm.made(/*training=*/false);
  const at::Tensor expected = made.tensor.clone();
  REQUIRE(made.drop());
  norm.variance.fill_(9);
  CHECK_EQ(state(made.tensor), "resident");
  CHECK(at::equal(made.tensor, expected));
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
    return lms().pager.find_or_track(storage, FoundBy::kHand);
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

TEST(what_is_more_than_its_bytes_is_no_recipe) {
  const Observed observed;
  const at::Tensor input = tensor_of(3).to(at::kFloat);
  const Made quantized =
      made_by([&] { return at::quantize_per_tensor(input, 0.5, 0, at::kQInt8); });
  REQUIRE(quantized.recipe != nullptr);
  CHECK(!lms().recipes.finish(quantized.recipe, {quantized.tensor}));
}

} // namespace
} // namespace torch_lms
