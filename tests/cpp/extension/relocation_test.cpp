// Storages whose bytes move to another block of the same device.

#include <algorithm>

#include <extension/policy/CrowdedWindow.h>

#include "made.h"

namespace torch_lms {
namespace {

constexpr const char* kNoWindows = "the CPU's allocator has no windows";

bool anywhere(const void*) {
  return true;
}

TEST(a_relocated_storage_has_its_bytes_elsewhere) {
  const Settled settled;
  const at::Tensor tensor = tensor_of(3);
  const void* before = tensor.const_data_ptr();
  REQUIRE(lms().pager.requests().relocate(tracked(tensor), &anywhere));
  CHECK(tensor.const_data_ptr() != before);
  CHECK_EQ(state(tensor), "resident");
  CHECK(holds(tensor, 3));
  CHECK(go_out(tensor)); // as any other
  CHECK(holds(tensor, 3));
}

TEST(an_address_that_does_not_suit_is_not_taken) {
  const Settled settled;
  const at::Tensor tensor = tensor_of(3);
  const void* before = tensor.const_data_ptr();
  const void* refused = nullptr;
  REQUIRE(lms().pager.requests().relocate(tracked(tensor), [&](const void* address) {
    const bool first = refused == nullptr;
    refused = first ? address : refused;
    return !first;
  }));
  CHECK(tensor.const_data_ptr() != before);
  CHECK(tensor.const_data_ptr() != refused);
  CHECK(!lms().pager.requests().relocate(tracked(tensor), [](const void*) { return false; }));
  CHECK(holds(tensor, 3));
}

TEST(what_is_in_use_or_out_stays_where_it_is) {
  const Settled settled;
  const OpCallbacks::Request request{lms().callbacks};
  const at::Tensor tensor = tensor_of(3);
  const EntityPtr entity = tracked(tensor);
  const void* before = tensor.const_data_ptr();
  entity->pin();
  CHECK(!lms().pager.requests().relocate(entity, &anywhere));
  entity->unpin();
  CHECK(tensor.const_data_ptr() == before);
  REQUIRE(go_out(tensor));
  CHECK(!lms().pager.requests().relocate(entity, &anywhere));
  CHECK_EQ(state(tensor), "paged_out");
  CHECK(holds(tensor, 3));
}

TEST(a_dropped_storage_is_made_again_from_one_that_was_relocated) {
  const Settled settled;
  const OpCallbacks::Request request{lms().callbacks};
  const at::Tensor input = tensor_of(3);
  const Made made = made_by([&] { return input.mul(5); });
  REQUIRE(made.drop());
  REQUIRE(lms().pager.requests().relocate(tracked(input), &anywhere));
  CHECK(holds(made.tensor, 15));
  CHECK(!lms().pager.requests().relocate(tracked(input), [](const void*) { return false; }));
}

const char* address_of(const at::Tensor& tensor) {
  return static_cast<const char*>(tensor.const_data_ptr());
}

AllocatorBlock used(const at::Tensor& tensor) {
  return {address_of(tensor), tensor.nbytes(), false};
}

TEST(a_window_is_made_of_what_costs_least_and_emptied) {
  const Settled settled;
  std::vector<at::Tensor> tensors;
  std::vector<Victim> victims; // the last eighth of them are needed too soon
  for (int64_t value = 0; value < 8; ++value) {
    tensors.push_back(tensor_of(value));
    victims.push_back({100 - static_cast<uint64_t>(value), tracked(tensors.back())});
  }
  const size_t nbytes = tensors[0].nbytes();
  const AllocatorBlock free{address_of(tensors[0]) + nbytes, nbytes, true};
  const CrowdedWindow window = find_crowded_window(
      {{used(tensors[5]), used(tensors[6])}, {used(tensors[0]), free}, {used(tensors[7]), free}},
      victims,
      2 * nbytes,
      2);
  REQUIRE(window.inside.size() == 1);
  CHECK(window.inside[0] == victims[0].entity);
  CHECK(window.holds(address_of(tensors[0])));
  CHECK(window.holds(address_of(tensors[0]) + 2 * nbytes - 1));
  CHECK(!window.holds(address_of(tensors[0]) + 2 * nbytes));
  const auto outside = [&](const void* address) { return !window.holds(address); };
  REQUIRE(lms().pager.requests().relocate(window.inside[0], outside));
  CHECK(!window.holds(address_of(tensors[0])));
  CHECK(holds(tensors[0], 0));
  CHECK(find_crowded_window({{used(tensors[7])}}, victims, nbytes, 2).inside.empty());
  CHECK(find_crowded_window({}, victims, nbytes, 2).inside.empty());
}

TEST(a_window_is_preferred_whose_storages_find_place_elsewhere) {
  const Settled settled;
  std::vector<at::Tensor> tensors;
  std::vector<Victim> victims;
  for (int64_t value = 0; value < 9; ++value) {
    tensors.push_back(tensor_of(value, value == 0 ? 4096 : 1024));
  }
  // A segment's blocks ascend; what malloc gives need not, once another thread has freed some.
  std::sort(tensors.begin() + 1, tensors.end(), [](const at::Tensor& a, const at::Tensor& b) {
    return address_of(a) < address_of(b);
  });
  for (size_t i = 0; i < tensors.size(); ++i) {
    victims.push_back({100 - i, tracked(tensors[i])});
  }
  const size_t small = tensors[1].nbytes();
  const auto free = [&](size_t after, size_t nbytes) {
    return AllocatorBlock{address_of(tensors[after]) + small, nbytes, true};
  };
  // The large one costs less than the three small ones, which are needed sooner: but there is no
  // hole for it.
  const std::vector<std::vector<AllocatorBlock>> segments = {
      {used(tensors[0])},
      {used(tensors[5]), free(5, small), used(tensors[6]), used(tensors[7])},
      {used(tensors[1]), free(1, small)},
      {free(2, 2 * small)}};
  const CrowdedWindow window = find_crowded_window(segments, victims, 4 * small, 2);
  REQUIRE(window.inside.size() == 3);
  CHECK(window.inside[0] == victims[5].entity);
  CHECK(window.inside[2] == victims[7].entity);
  CHECK(window.holds(address_of(tensors[5])));
  REQUIRE(window.cheapest.size() == 1); // if they cannot be moved after all
  CHECK(window.cheapest[0] == victims[0].entity);
  // Nothing finds place: the cheapest window.
  const CrowdedWindow none = find_crowded_window({{used(tensors[0])}}, victims, 4 * small, 2);
  REQUIRE(none.inside.size() == 1);
  CHECK(none.inside[0] == victims[0].entity);
}

TEST(a_window_that_leaves_without_copies_is_cheaper_the_more_a_copy_costs) {
  const Settled settled;
  const OpCallbacks::Request request{lms().callbacks};
  const KeepsCopies keeps;
  const std::vector<at::Tensor> tensors = {
      tensor_of(0), tensor_of(1), kept_tensor(2), tensor_of(3)};
  std::vector<Victim> victims;
  for (const at::Tensor& tensor : tensors) {
    victims.push_back({100 - victims.size(), tracked(tensor)});
  }
  REQUIRE(victims[2].entity->keeps_copy()); // in the later half: what is needed soon costs twice
  REQUIRE(!victims[0].entity->keeps_copy());
  const size_t nbytes = tensors[0].nbytes();
  const std::vector<std::vector<AllocatorBlock>> segments = {
      {used(tensors[0])}, {used(tensors[2])}, {used(tensors[3])}};
  const auto cheapest = [&](size_t copy_cost) {
    return find_crowded_window(segments, victims, nbytes, copy_cost).cheapest;
  };
  CHECK(cheapest(1) == std::vector<EntityPtr>{victims[0].entity});
  CHECK(cheapest(3) == std::vector<EntityPtr>{victims[2].entity});
}

/// Automatic mode on a device whose memory in one piece is what the test says.
struct Crowded : Settled {
  explicit Crowded(AsyncDevice& device) : fake(device) {
    lms().policy.enable(fake, size_t{64} << 20, 4096);
  }
  ~Crowded() {
    fake.has_hole = nullptr;
    fake.is_fragmented = nullptr;
    fake.shown_blocks = nullptr;
  }
  AsyncDevice& fake;
};

TEST(what_would_be_copied_out_moves_to_where_something_leaves_without_a_copy) {
  const Crowded crowded(fake_device(kNoWindows));
  const at::Tensor dirty = tensor_of(1, 10000);
  const at::Tensor clean = kept_tensor(2); // smaller, but there is something free beside it
  REQUIRE(holds(dirty, 1) && holds(clean, 2));
  const int64_t out = lms().pager.stats().pageouts.load();
  const char* before = address_of(dirty);
  constexpr size_t kFree = size_t{1} << 20;
  const bool behind = address_of(clean) < before; // where there is nothing of the other's
  crowded.fake.shown_blocks = [&] {
    std::vector<AllocatorBlock> window{used(dirty)};
    const char* free = behind ? before + dirty.nbytes() : before - kFree;
    window.insert(behind ? window.end() : window.begin(), {free, kFree, true});
    const AllocatorBlock beside{address_of(clean) + clean.nbytes(), clean.nbytes(), true};
    return std::vector<std::vector<AllocatorBlock>>{window, {used(clean), beside}};
  };
  crowded.fake.is_fragmented = [&] { return address_of(dirty) == before; };
  crowded.fake.has_hole = [&](size_t) { return state(clean) == "paged_out"; };
  const at::Tensor large = tensor_of(4, (1 << 17) + 1); // the free block is too small for it
  CHECK(address_of(dirty) != before);
  CHECK_EQ(state(dirty), "resident");
  CHECK_EQ(state(clean), "paged_out");
  CHECK_EQ(lms().pager.stats().pageouts.load(), out);
  crowded.fake.has_hole = nullptr;
  CHECK(holds(dirty, 1) && holds(clean, 2) && holds(large, 4));
}

TEST(what_leaves_without_a_copy_goes_before_a_copy_in_is_called_off) {
  const Crowded crowded(fake_device(kNoWindows));
  const at::Tensor coming = tensor_of(1, 10000);
  REQUIRE(go_out(coming));
  const at::Tensor clean = kept_tensor(2);
  REQUIRE(holds(clean, 2));
  {
    const HeldCopies held;
    REQUIRE(lms().pager.requests().prefetch_ahead(tracked(coming), 0));
    crowded.fake.shown_blocks = [&] {
      const AllocatorBlock beside{address_of(clean) + clean.nbytes(), size_t{1} << 20, true};
      return std::vector<std::vector<AllocatorBlock>>{{used(clean), beside}};
    };
    crowded.fake.has_hole = [](size_t) { return false; }; // nothing can be moved
    crowded.fake.is_fragmented = [&] { return state(clean) != "paged_out"; };
    const at::Tensor large = tensor_of(4, (1 << 17) + 1); // the free block is too small for it
    CHECK_EQ(state(clean), "paged_out");
    CHECK(state(coming) != "paged_out");
  }
  crowded.fake.has_hole = nullptr;
  CHECK(holds(coming, 1) && holds(clean, 2));
}

/// A window full of tensors, which find place where others leave that have copies.
struct Trade : Crowded {
  Trade(AsyncDevice& device, size_t count) : Crowded(device) {
    for (size_t i = 0; i < 4 * count; ++i) { // the last eighth of `kept` stays
      (i < count ? inside : i < 3 * count ? kept : soon).push_back(tensor_of(int64_t(i), 1 << 15));
    }
    std::sort(inside.begin(), inside.end(), [](const at::Tensor& a, const at::Tensor& b) {
      return address_of(a) < address_of(b);
    });
    for (const at::Tensor& tensor : inside) {
      before.push_back(address_of(tensor));
    }
    for (const at::Tensor& tensor : kept) {
      REQUIRE(go_out(tensor));
    }
    for (const auto& tensors : {kept, soon}) { // what is needed very next stays
      for (const at::Tensor& tensor : tensors) {
        tensor.sum();
      }
    }
    fake.shown_blocks = [this] { return blocks(); };
    fake.is_fragmented = [this] { return moved() < inside.size(); };
    fake.has_hole = [this](size_t) {
      const bool some = left() > moved();
      in_vain += some ? 0 : 1;
      return some;
    };
  }

  std::vector<std::vector<AllocatorBlock>> blocks() const {
    std::vector<std::vector<AllocatorBlock>> segments(1);
    for (size_t i = 0; i < inside.size(); ++i) {
      segments[0].push_back({before[i], inside[i].nbytes(), address_of(inside[i]) != before[i]});
    }
    for (const at::Tensor& tensor : kept) {
      if (state(tensor) == "resident") {
        segments.push_back({used(tensor)});
      }
    }
    return segments;
  }
  size_t left() const { // some may come back
    const auto nbytes = static_cast<int64_t>(kept[0].nbytes());
    return static_cast<size_t>(lms().pager.stats().dropped_bytes.load() / nbytes);
  }
  size_t moved() const {
    size_t count = 0;
    for (size_t i = 0; i < inside.size(); ++i) {
      count += state(inside[i]) == "resident" && address_of(inside[i]) != before[i] ? 1 : 0;
    }
    return count;
  }
  /// Needs all of the window.
  at::Tensor fill() const {
    return tensor_of(4, static_cast<int64_t>(inside.size()) << 15);
  }

  std::vector<at::Tensor> inside;
  std::vector<at::Tensor> kept;
  std::vector<at::Tensor> soon;
  std::vector<const char*> before;
  size_t in_vain = 0; ///< How often a hole was looked for, and there was none.
};

TEST(who_changes_places_is_moved_when_there_is_a_place_and_nobody_else) {
  const size_t count = PolicyOptions().most_to_trade;
  const Trade trade(fake_device(kNoWindows), count);
  const at::Tensor large = trade.fill();
  CHECK_EQ(trade.moved(), count);
  CHECK_EQ(trade.left(), count);
  CHECK_EQ(trade.in_vain, count); // before anything had left
}

TEST(many_small_ones_do_not_change_places) {
  const Trade trade(fake_device(kNoWindows), PolicyOptions().most_to_trade + 1);
  const at::Tensor large = trade.fill();
  CHECK_EQ(trade.moved(), 0U);
  CHECK_EQ(trade.left(), 0U);
}

} // namespace
} // namespace torch_lms
