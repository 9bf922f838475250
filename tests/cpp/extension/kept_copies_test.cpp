// Copies that the host keeps of what nobody has written since: what is dropped for them, what
// is written all the same, and how they end with the mode.

#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/full_like.h>
#include <extension/base/Compat.h>
#include <torch/library.h>

#include <optional>

#include "made.h"
#include "rig.h"

namespace torch_lms {
namespace {

bool drops(const at::Tensor& tensor) {
  const int64_t before = lms().pager.stats().dropped_bytes.load();
  const int64_t copied = lms().pager.stats().pageouts.load();
  CHECK(go_out(tensor));
  const bool dropped = lms().pager.stats().dropped_bytes.load() != before;
  CHECK_EQ(lms().pager.stats().pageouts.load() - copied, dropped ? 0 : 1);
  return dropped;
}

TEST(what_nobody_has_written_is_dropped) {
  const Settled settled;
  const KeepsCopies keeps;
  const at::Tensor tensor = kept_tensor(3);
  for (int i = 0; i < 5; ++i) {
    CHECK(drops(tensor));
    CHECK_EQ(*tensor.const_data_ptr<int64_t>(), 3);
    CHECK(holds(tensor, 3));
  }
}

TEST(what_an_op_has_written_is_copied) {
  const Settled settled;
  const KeepsCopies keeps;
  at::Tensor tensor = kept_tensor(3);
  tensor.add_(1);
  CHECK(!drops(tensor));
  CHECK(holds(tensor, 4));
  CHECK(drops(tensor)); // as it has come in since
  tensor.view({64, 128}).select(0, 63).fill_(5); // out, and then by way of a view
  CHECK(!drops(tensor));
  CHECK(holds(tensor.slice(0, 63 * 128), 5));
  CHECK(holds(tensor.slice(0, 0, 63 * 128), 4));
}

TEST(what_was_written_through_an_address_is_copied) {
  if (!compat::kHasMaterializer) {
    SKIP("this PyTorch does not tell of it");
  }
  const Settled settled;
  const KeepsCopies keeps;
  at::Tensor tensor = kept_tensor(3);
  auto* data = tensor.mutable_data_ptr<int64_t>();
  data[8191] = 8;
  lms().addresses.take_back();
  CHECK(!drops(tensor));
  CHECK_EQ(tensor[8191].item<int64_t>(), 8);
  CHECK_EQ(tensor[0].item<int64_t>(), 3);
}

TEST(what_was_written_in_place_on_the_host_comes_in) {
  const Settled settled;
  const KeepsCopies keeps;
  at::Tensor tensor = kept_tensor(3);
  REQUIRE(drops(tensor));
  static_cast<int64_t*>(const_cast<void*>(tensor.const_data_ptr()))[17] = 8; // nothing tells of it
  CHECK_EQ(tensor[17].item<int64_t>(), 8);
  CHECK(drops(tensor));
  CHECK_EQ(tensor[17].item<int64_t>(), 8);
}

/// A kernel as CUDA's: it asks for addresses to write to of what it reads.
at::Tensor grouped_mm(
    const at::Tensor& self,
    const at::Tensor& mat2,
    const std::optional<at::Tensor>&,
    const std::optional<at::Tensor>&,
    std::optional<at::ScalarType>) {
  return at::full_like(self, *mat2.mutable_data_ptr<int64_t>());
}

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("_grouped_mm", &grouped_mm);
}

TEST(what_an_op_only_reads_through_an_address_is_dropped) {
  const Settled settled;
  const KeepsCopies keeps;
  const at::Tensor x = tensor_of(1);
  const at::Tensor weight = kept_tensor(3);
  for (int i = 0; i < 5; ++i) {
    CHECK(holds(at::_grouped_mm(x, weight), 3));
    CHECK(drops(weight));
    CHECK(holds(at::_grouped_mm(x, weight), 3)); // that it comes in for
    CHECK(drops(weight));
    CHECK(holds(weight, 3));
  }
}

TEST(what_is_made_again_only_reads_what_it_is_made_from) {
  const Settled settled;
  const OpCallbacks::Request request(lms().callbacks);
  const KeepsCopies keeps;
  const at::Tensor x = tensor_of(1);
  const at::Tensor weight = kept_tensor(3);
  const Made made = made_by([&] { return at::_grouped_mm(x, weight); });
  for (int i = 0; i < 5; ++i) {
    REQUIRE(made.drop());
    CHECK(holds(made.tensor, 3));
    CHECK(drops(weight));
  }
}

TEST(what_was_written_before_an_op_that_takes_its_address_is_copied) {
  const Settled settled;
  const KeepsCopies keeps;
  const at::Tensor x = tensor_of(1);
  at::Tensor weight = kept_tensor(3);
  weight.add_(1);
  CHECK(holds(at::_grouped_mm(x, weight), 4));
  CHECK(!drops(weight));
  CHECK(holds(weight, 4));
  weight.mutable_data_ptr<int64_t>()[17] = 8;
  lms().addresses.take_back();
  CHECK(holds(at::_grouped_mm(x, weight), 4));
  CHECK(!drops(weight));
  CHECK_EQ(weight[17].item<int64_t>(), 8);
  CHECK_EQ(weight[0].item<int64_t>(), 4);
}

TEST(what_comes_in_is_counted_once) {
  fake_device("the queue's worker copies it");
  const Settled settled;
  const at::Tensor tensor = tensor_of(3);
  REQUIRE(go_out(tensor));
  const EntityPtr entity = lms().pager.find(*tensor.storage().unsafeGetStorageImpl());
  const size_t nbytes = entity->nbytes();
  CHECK_EQ(lms().pager.off_device_bytes(), nbytes);
  REQUIRE(lms().pager.requests().prefetch_ahead(entity, 0));
  CHECK_EQ(lms().pager.paged_out_bytes(), static_cast<int64_t>(nbytes));
  CHECK_EQ(lms().pager.off_device_bytes(), 0U);
  REQUIRE(lms().pager.requests().cancel_last_prefetch());
  CHECK_EQ(lms().pager.off_device_bytes(), nbytes);
  REQUIRE(lms().pager.requests().prefetch_ahead(entity, 0));
  CHECK(holds(tensor, 3));
  CHECK_EQ(lms().pager.off_device_bytes(), 0U);
}

TEST(kept_copies_go_when_the_mode_ends) {
  const Settled settled;
  at::Tensor tensor;
  {
    const KeepsCopies keeps;
    tensor = kept_tensor(3);
  }
  const EntityPtr entity = lms().pager.find(*tensor.storage().unsafeGetStorageImpl());
  CHECK(!entity->keeps_copy());
  CHECK(!compat::block_is_watched(*tensor.storage().unsafeGetStorageImpl()));
  CHECK(!drops(tensor));
}

TEST(blocks_are_watched_on_where_the_mode_has_begun_again) {
  const Settled settled;
  const KeepsCopies keeps;
  const at::Tensor tensor = kept_tensor(3);
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  lms().pager.find(storage)->release_copy();
  lms().pager.kept_copies().keep(false);
  lms().pager.kept_copies().keep(true); // by another thread
  lms().pager.kept_copies().unwatch_all();
  CHECK(compat::block_is_watched(storage));
}

TEST(no_block_is_watched_when_the_mode_has_ended) {
  const Settled settled;
  at::Tensor tensor;
  {
    const KeepsCopies keeps;
    tensor = kept_tensor(3);
    c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
    HostPool& pool = *Program::get().device().pool();
    pool.set_limit(pool.stats().slab_bytes);
    try {
      pool.allocate(pool.stats().slab_bytes + 1); // there is no room before the copy has gone
      CHECK(false);
    } catch (const HostPoolFull&) {
    }
    pool.set_limit(SIZE_MAX);
    CHECK(!lms().pager.find(storage)->keeps_copy());
    CHECK(compat::block_is_watched(storage));
  }
  CHECK(!compat::block_is_watched(*tensor.storage().unsafeGetStorageImpl()));
  CHECK(holds(tensor, 3));
}

/// A storage whose copy is kept and on its way in; it arrives when `held` goes.
struct OnItsWayIn {
  OnItsWayIn() {
    REQUIRE(go_out(tensor));
    entity = lms().pager.find(*tensor.storage().unsafeGetStorageImpl());
    held.emplace();
    REQUIRE(lms().pager.requests().prefetch_ahead(entity, 0));
  }

  const Settled settled;
  const KeepsCopies keeps;
  const at::Tensor tensor = tensor_of(3);
  EntityPtr entity;
  std::optional<HeldCopies> held;
};

TEST(a_block_that_goes_before_it_is_filled_outlasts_its_copy) {
  fake_device("its copies are over when they have been submitted");
  OnItsWayIn one;
  std::thread waits([] { lms().manual.wait_pageins(); });
  while (lms().pager.paged_out_storages() != 0) { // until it has been committed
    std::this_thread::yield();
  }
  std::thread fills([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    one.held.reset();
  });
  CHECK(
      lms().pager.requests().drop_unwritten(one.entity)); // the fake device looks at what it frees
  fills.join();
  waits.join();
  CHECK(holds(one.tensor, 3));
}

TEST(a_copy_that_comes_while_the_mode_ends_goes) {
  AsyncDevice* device = Program::get().async;
  if (device == nullptr) {
    SKIP("its copies are over when they have been submitted");
  }
  OnItsWayIn one;
  device->when_kept = [&] { // the storage has its block, and the pager has not been told yet
    CHECK(one.entity->keeps_copy());
    end_keeping(); // what another thread does
    one.held.reset();
  };
  lms().manual.wait_pageins();
  REQUIRE(device->when_kept == nullptr);
  CHECK_EQ(state(one.tensor), "resident");
  CHECK(!one.entity->keeps_copy());
  CHECK(!compat::block_is_watched(*one.tensor.storage().unsafeGetStorageImpl()));
  CHECK(holds(one.tensor, 3));
}

TEST(copies_that_ops_bring_while_the_mode_ends_go) {
  const Settled settled;
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 4; ++i) {
    tensors.push_back(tensor_of(i));
  }
  for (int round = 0; round < 200; ++round) {
    lms().pager.kept_copies().keep(true);
    page_out(tensors);
    lms().manual.wait_pageouts();
    in_threads(3, [&](int t) {
      if (t == 2) {
        end_keeping();
        return;
      }
      for (size_t i = static_cast<size_t>(t); i < tensors.size(); i += 2) {
        CHECK(holds(tensors[i], static_cast<int64_t>(i)));
      }
    });
    for (const at::Tensor& tensor : tensors) {
      CHECK(!lms().pager.find(*tensor.storage().unsafeGetStorageImpl())->keeps_copy());
    }
  }
}

TEST(what_an_op_uses_while_the_mode_ends_keeps_its_block) {
  const Settled settled;
  const OpCallbacks::Request request(lms().callbacks);
  const KeepsCopies keeps;
  const at::Tensor tensor = kept_tensor(3);
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  std::optional<RecordedOp> op;
  op.emplace("torch_lms_test::runs", std::vector<c10::IValue>{tensor});
  end_keeping(); // what another thread does
  CHECK(compat::block_is_watched(storage)); // the op may be asking for its address
  op.reset();
  CHECK(!lms().pager.find(storage)->keeps_copy());
  CHECK(holds(tensor, 3));
}

TEST(ops_write_while_the_mode_ends) {
  const Settled settled;
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 16; ++i) {
    tensors.push_back(tensor_of(i, 512));
  }
  for (int round = 0; round < 300; ++round) {
    lms().pager.kept_copies().keep(true);
    page_out(tensors);
    lms().manual.wait_pageouts();
    for (size_t i = 0; i < tensors.size(); ++i) {
      CHECK(holds(tensors[i], static_cast<int64_t>(i) + round));
    }
    std::atomic<int> ready{0};
    in_threads(2, [&](int t) {
      for (++ready; ready != 2;) { // at the same time
        std::this_thread::yield();
      }
      if (t == 1) {
        end_keeping();
        return;
      }
      for (at::Tensor& tensor : tensors) {
        tensor.add_(1);
      }
    });
  }
}

} // namespace
} // namespace torch_lms
