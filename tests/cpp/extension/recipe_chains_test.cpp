// Storages that are made from what has been dropped, too: from the beginning of the chain, without
// room for all that lies between.

#include <ATen/ops/maximum.h>

#include "limited.h"
#include "made.h"

namespace torch_lms {
namespace {

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

/// Each adds one to what was made before it; but behind each `rung` of those stands the greater of
/// the last and of what they began with.
std::vector<Made> ladder(const at::Tensor& first, size_t count, size_t rung) {
  std::vector<Made> chain;
  at::Tensor begun = first;
  while (chain.size() < count) {
    const at::Tensor last = chain.empty() ? first : chain.back().tensor;
    if (chain.size() % (rung + 1) == rung) {
      chain.push_back(made_by([&] { return at::maximum(begun, last); }));
      begun = chain.back().tensor;
    } else {
      chain.push_back(made_by([&] { return last.add(1); }));
    }
  }
  return chain;
}

/// What the device has in use at most while the last of a chain is made again.
size_t peak_of(std::vector<Made>& chain) {
  for (const Made& made : chain) {
    REQUIRE(made.drop());
  }
  const Made last = std::move(chain.back());
  chain.clear();
  Device& device = Program::get().device();
  const size_t before = device.use().allocated_bytes;
  device.reset_peak();
  CHECK_EQ(last.tensor.sum().item<int64_t>(), last.tensor.numel() * 17);
  CHECK(device.use().peak_allocated_bytes > before); // it is counted
  return device.use().peak_allocated_bytes - before;
}

TEST(what_lies_between_goes_as_soon_as_it_has_been_used) {
  const Limited limited(size_t{1} << 30);
  const Observed observed;
  const at::Tensor first = tensor_of(1, 1 << 16);
  std::vector<Made> chain = ladder(first, 16, 16);
  CHECK(peak_of(chain) <= 2 * first.storage().nbytes() + 4096);
}

TEST(what_two_of_a_chain_are_made_from_is_made_once) {
  const Limited limited(size_t{1} << 30);
  const Observed observed;
  const at::Tensor first = tensor_of(1, 1 << 16);
  std::vector<Made> chain = ladder(first, 31, 1);
  const int64_t already = recomputations();
  CHECK(peak_of(chain) <= 4 * first.storage().nbytes() + 4096);
  CHECK_EQ(recomputations() - already, 31);
}

TEST(what_a_chain_needs_again_is_not_dropped_meanwhile) {
  const Observed observed;
  const at::Tensor first = tensor_of(1);
  const std::vector<Made> chain = ladder(first, 37, 2);
  for (const Made& made : chain) {
    REQUIRE(made.drop());
  }
  const int64_t already = recomputations();
  {
    const Asked asked(SIZE_MAX, [&](Device&, size_t) { // another thread, say
      for (size_t i = 0; i + 1 < chain.size(); ++i) {
        chain[i].drop();
      }
      return true;
    });
    CHECK(holds(chain.back().tensor, 26));
  }
  CHECK_EQ(recomputations() - already, 37);
}

TEST(of_a_long_chain_of_loose_recipes_some_stay_in_either_order) {
  const Observed observed;
  for (const bool first_one_first : {true, false}) {
    const at::Tensor input = tensor_of(3);
    std::vector<Made> chain;
    for (int64_t i = 0; i < 20; ++i) {
      const at::Tensor& from = chain.empty() ? input : chain.back().tensor;
      chain.push_back(made_loosely_by([&] { return from.add(1); }));
    }
    size_t in_a_row = 0;
    size_t dropped = 0;
    for (size_t i = 0; i < chain.size(); ++i) {
      chain[first_one_first ? i : chain.size() - 1 - i].drop();
    }
    for (const Made& made : chain) {
      in_a_row = made.entity->state() == EntityState::kDropped ? in_a_row + 1 : 0;
      dropped += in_a_row != 0 ? 1 : 0;
      CHECK(in_a_row < 5);
    }
    CHECK(dropped > chain.size() / 2);
    CHECK(holds(chain.back().tensor, 23));
    CHECK(holds(chain[10].tensor, 14));
  }
}

} // namespace
} // namespace torch_lms
