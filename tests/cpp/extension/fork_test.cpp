// Forked children: they have the bytes of what was out, and their ops run.

#include <random>

#include "rig.h"

namespace torch_lms {
namespace {

/// What was out before the fork, or on its way, reads right in the child and in the parent.
void check_fork(std::vector<at::Tensor> tensors) {
  const bool passed = harness::passes_in_child([&] {
    for (size_t i = 0; i < tensors.size(); ++i) {
      CHECK_EQ(tensors[i].const_data_ptr<int64_t>()[100], static_cast<int64_t>(i));
      CHECK(holds(tensors[i], static_cast<int64_t>(i)));
      tensors[i].add_(100); // the child's own
      CHECK(holds(tensors[i], static_cast<int64_t>(i) + 100));
    }
    tensors.clear();
  });
  CHECK(passed);
}

TEST(a_child_has_the_bytes_whatever_was_under_way) {
  const Settled settled;
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 6; ++i) {
    tensors.push_back(tensor_of(i));
  }
  REQUIRE(go_out(tensors[1]));
  REQUIRE(go_out(tensors[2]));
  REQUIRE(go_out(tensors[3]));
  REQUIRE(go_out(tensors[4]));
  lms().pager.in_queue().start_actions();
  lms().pager.in_queue().wait_and_stop_actions(); // no worker, so that one stays queued
  lms().pager.in_queue().open();
  lms().manual.prefetch({tensors[2].storage()}, false);
  CHECK_EQ(state(tensors[2]), "in_queued");
  {
    const HeldCopies held;
    page_out({tensors[0], tensors[5]});
    check_fork(tensors);
    lms().pager.in_queue().start_actions();
    lms().manual.prefetch({tensors[3].storage()}, true);
    for (int i = 0; i < 100 && state(tensors[3]) == "in_queued"; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    check_fork(tensors);
  }
  lms().manual.wait_pageouts();
  lms().manual.wait_pageins();
  check_fork(tensors);
  for (int i = 0; i < 6; ++i) {
    CHECK(holds(tensors[static_cast<size_t>(i)], i));
  }
}

TEST(a_child_of_a_busy_program_has_its_bytes) {
  if (Program::get().async != nullptr) {
    SKIP("a child cannot wait for a copy to the fake device");
  }
  const Settled settled;
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 4; ++i) {
    tensors.push_back(tensor_of(i));
  }
  std::atomic<bool> over{false};
  std::thread busy([&] {
    std::mt19937 random(1);
    while (!over) {
      const at::Tensor& tensor = tensors[random() % tensors.size()];
      if (random() % 2 == 0) {
        page_out({tensor});
        lms().pager.commit_finished();
      } else {
        prefetch(tensor);
        lms().pager.commit_finished();
      }
    }
  });
  for (int i = 0; i < 10; ++i) {
    // Not `check_fork`: the other thread may hold locks of PyTorch's allocators in the child.
    CHECK(harness::passes_in_child([&] {
      for (size_t k = 0; k < tensors.size(); ++k) {
        const auto* data = tensors[k].const_data_ptr<int64_t>();
        CHECK_EQ(data[0], static_cast<int64_t>(k));
        CHECK_EQ(data[8191], static_cast<int64_t>(k));
      }
    }));
  }
  over = true;
  busy.join();
  lms().manual.wait_pageouts();
  lms().manual.wait_pageins();
}

/// See Note [Locks that a forked child takes].
TEST(ops_run_in_a_child_forked_while_the_callback_comes_and_goes) {
  const Settled settled;
  const at::Tensor tensor = tensor_of(1);
  std::atomic<bool> over{false};
  std::thread busy([&] {
    while (!over) {
      {
        const OpCallbacks::Request request(lms().callbacks);
      }
      lms().callbacks.stop_if_idle();
    }
  });
  int passed = 0;
  for (int i = 0; i < 40 && passed == i; ++i) {
    passed += harness::passes_in_child([&] { CHECK(holds(tensor, 1)); });
  }
  over = true;
  busy.join();
  CHECK_EQ(passed, 40);
}

} // namespace
} // namespace torch_lms
