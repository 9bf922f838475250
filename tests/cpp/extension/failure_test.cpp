// Every allocation that the extension makes fails once, wherever it is: what was asked for may
// fail, the bytes are right, nothing stays pinned, and the next move works.

#include <chrono>
#include <future>
#include <thread>

#include <c10/util/Exception.h>
#include <entity/Error.h>
#include <extension/base/Compat.h>

#include "failing_new.h"
#include "made.h"

namespace torch_lms {
namespace {

constexpr long kMost = 2000;

/// `call` with each of its allocations failing in turn, until none does. Before each, `prepare`;
/// after each, `check`, when nothing fails any more.
void fail_each(
    const std::function<void()>& prepare,
    const std::function<void()>& call,
    const std::function<void()>& check) {
  long nth = 0;
  const int before = harness::failures();
  for (bool failed = true; failed && nth < kMost; ++nth) {
    prepare();
    {
      FailingNew failing(nth);
      try {
        call();
      } catch (const std::bad_alloc&) {
      } catch (const c10::Error&) { // as PyTorch passes it on
      }
      failed = failing.failed();
    }
    check();
    check_nothing_is_pinned();
    if (harness::failures() != before) {
      std::fprintf(stderr, "  at allocation %ld\n", nth);
      return;
    }
  }
  CHECK(nth > 1); // or nothing has been tested
  CHECK(nth < kMost);
}

/// A tensor that is made anew for each failure, and after it goes out and comes back.
struct OneTensor {
  at::Tensor tensor;
  int64_t value = 3;

  void renew() {
    value = 3;
    tensor = tensor_of(value);
  }
  void check() {
    CHECK(holds(tensor, value));
    CHECK(go_out(tensor));
    CHECK(holds(tensor, value));
  }
};

TEST(a_request_by_hand) {
  const Settled settled;
  OneTensor one;
  fail_each([&] { one.renew(); }, [&] { page_out({one.tensor}); }, [&] { one.check(); });
}

TEST(requests_of_many_by_hand) {
  const Settled settled;
  std::vector<at::Tensor> tensors;
  fail_each(
      [&] {
        tensors.clear();
        for (int i = 0; i < 5; ++i) {
          tensors.push_back(tensor_of(i));
        }
      },
      [&] { page_out(tensors); },
      [&] {
        lms().manual.wait_pageouts();
        for (int i = 0; i < 5; ++i) {
          CHECK(holds(tensors[static_cast<size_t>(i)], i));
          CHECK(go_out(tensors[static_cast<size_t>(i)]));
        }
      });
}

TEST(a_wait_that_commits) {
  const Settled settled;
  OneTensor one;
  fail_each(
      [&] {
        one.renew();
        page_out({one.tensor});
      },
      [&] { lms().manual.wait_pageouts(); },
      [&] { one.check(); });
}

TEST(an_op_on_what_is_out) {
  const Settled settled;
  OneTensor one;
  fail_each(
      [&] {
        one.renew();
        REQUIRE(go_out(one.tensor));
      },
      [&] { one.tensor.add_(1); },
      [&] {
        one.value = one.tensor[0].item<int64_t>(); // whole, if at all
        CHECK(one.value == 3 || one.value == 4);
        one.check();
      });
}

TEST(an_op_on_what_is_on_its_way) {
  const Settled settled;
  OneTensor one;
  fail_each(
      [&] {
        one.renew();
        page_out({one.tensor});
      },
      [&] { CHECK(holds(one.tensor, 3)); },
      [&] {
        lms().manual.wait_pageouts();
        one.check();
      });
}

TEST(a_thread_whose_first_op_finds_no_memory) {
  const Settled settled;
  OneTensor one;
  long nth = 0;
  for (bool failed = true; failed && nth < kMost; ++nth) {
    one.renew();
    REQUIRE(go_out(one.tensor));
    std::thread([&] {
      FailingNew failing(nth);
      CHECK(holds(one.tensor, 3));
      failed = failing.failed();
    }).join();
    one.check();
    check_nothing_is_pinned();
  }
  CHECK(nth > 3);
}

void fail_each_of_a_prefetch() {
  OneTensor one;
  fail_each(
      [&] {
        one.renew();
        REQUIRE(go_out(one.tensor));
      },
      [&] {
        prefetch(one.tensor);
        lms().manual.wait_pageins();
      },
      [&] {
        lms().manual.wait_pageins();
        one.check();
      });
}

TEST(a_prefetch_and_its_wait) {
  const Settled settled;
  fail_each_of_a_prefetch();
}

TEST(a_prefetch_ahead) {
  fake_device("it is enqueued, which takes no memory");
  const Settled settled;
  OneTensor one;
  fail_each(
      [&] {
        one.renew();
        REQUIRE(go_out(one.tensor));
      },
      [&] {
        lms().pager.requests().prefetch_ahead(
            lms().pager.find(*one.tensor.storage().unsafeGetStorageImpl()), 0);
      },
      [&] {
        lms().manual.wait_pageins();
        one.check();
      });
}

TEST(a_raw_access) {
  if (!compat::kHasMaterializer) {
    SKIP("this PyTorch does not tell of it");
  }
  const Settled settled;
  OneTensor one;
  fail_each(
      [&] {
        one.renew();
        REQUIRE(go_out(one.tensor));
      },
      [&] { lms().addresses.give_out(*one.tensor.storage().unsafeGetStorageImpl()); },
      [&] {
        lms().addresses.take_back();
        one.check();
      });
}

TEST(storages_that_are_held) {
  const Settled settled;
  OneTensor one;
  Pinned held;
  fail_each(
      [&] {
        one.renew();
        REQUIRE(go_out(one.tensor));
      },
      [&] {
        lms().addresses.hold({one.tensor.storage()}, held);
        lms().addresses.release(held);
      },
      [&] {
        lms().addresses.release(held);
        one.check();
      });
}

TEST(a_pin_by_the_program) {
  const Settled settled;
  OneTensor one;
  bool pinned = false;
  fail_each(
      [&] {
        one.renew();
        REQUIRE(go_out(one.tensor));
        pinned = false;
      },
      [&] {
        lms().manual.pin(one.tensor.storage());
        pinned = true;
      },
      [&] {
        const EntityPtr entity = lms().pager.find(*one.tensor.storage().unsafeGetStorageImpl());
        if (entity->fixed()) {
          entity->unfix();
        }
        one.check();
      });
}

TEST(the_end_of_all) {
  const Settled settled;
  OneTensor one;
  fail_each(
      [&] {
        one.renew();
        REQUIRE(go_out(one.tensor));
      },
      [&] { lms().disable(); },
      [&] { one.check(); });
}

TEST(a_storage_that_dies_on_the_host) {
  const Settled settled;
  OneTensor one;
  fail_each(
      [&] {
        one.renew();
        page_out({tensor_of(9)}); // so that there is something to fail
        lms().manual.wait_pageouts();
        REQUIRE(go_out(one.tensor));
      },
      [&] {
        one.tensor = at::Tensor();
        one.tensor = tensor_of(3);
        page_out({one.tensor});
      },
      [&] {
        lms().manual.wait_pageouts();
        one.check();
      });
}

TEST(a_storage_that_is_given_other_memory_on_the_host) {
  const Settled settled;
  OneTensor one;
  c10::DataPtr other;
  fail_each(
      [&] {
        one.renew();
        REQUIRE(go_out(one.tensor));
        other = c10::GetCPUAllocator()->allocate(one.tensor.nbytes());
        std::memset(other.get(), 0, one.tensor.nbytes());
      },
      [&] { one.tensor.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(other)); },
      [&] { CHECK(holds(one.tensor, 0)); });
}

TEST(a_kept_copy_that_is_dropped) {
  const Settled settled;
  OneTensor one;
  lms().pager.kept_copies().keep(true);
  fail_each(
      [&] {
        one.renew();
        REQUIRE(go_out(one.tensor));
        CHECK(holds(one.tensor, 3));
      },
      [&] { page_out({one.tensor}); },
      [&] {
        lms().manual.wait_pageouts();
        one.check();
      });
  end_keeping();
}

TEST(an_op_on_what_is_out_and_keeps_its_copy) {
  const Settled settled;
  const KeepsCopies keeps;
  OneTensor one;
  fail_each(
      [&] {
        one.renew();
        REQUIRE(go_out(one.tensor));
      },
      [&] { CHECK(holds(one.tensor, 3)); },
      [&] { one.check(); });
}

TEST(a_prefetch_of_what_keeps_its_copy) {
  const Settled settled;
  const KeepsCopies keeps;
  fail_each_of_a_prefetch();
}

TEST(the_end_of_all_kept_copies) {
  const Settled settled;
  const KeepsCopies keeps;
  std::vector<at::Tensor> tensors;
  long nth = 0;
  for (bool failed = true; failed && nth < kMost; ++nth) {
    lms().pager.kept_copies().keep(true);
    tensors = {kept_tensor(3), kept_tensor(4)};
    {
      FailingNew failing(nth);
      end_keeping();
      failed = failing.failed();
    }
    for (const at::Tensor& tensor : tensors) {
      CHECK(!lms().pager.find(*tensor.storage().unsafeGetStorageImpl())->keeps_copy());
    }
    check_nothing_is_pinned();
  }
  CHECK(nth > 1);
}

TEST(a_drop_and_its_return) {
  const Settled settled;
  const OpCallbacks::Request request(lms().callbacks);
  at::Tensor input;
  Made made;
  fail_each(
      [&] {
        input = tensor_of(3);
        made = made_by([&] { return input.mul(5); });
      },
      [&] {
        made.drop();
        lms().pager.use(made.entity); // fails, or not, and can be asked again
      },
      [&] {
        CHECK(holds(made.tensor, 15));
        CHECK(go_out(made.tensor));
        CHECK(holds(made.tensor, 15));
      });
}

TEST(a_write_to_what_something_dropped_is_made_from) {
  const Settled settled;
  const OpCallbacks::Request request(lms().callbacks);
  at::Tensor input;
  Made made;
  fail_each(
      [&] {
        input = tensor_of(3);
        made = made_by([&] { return input.mul(5); });
        made.drop();
      },
      [&] { lms().recipes.before_write(*input.storage().unsafeGetStorageImpl()); },
      [&] {
        CHECK(holds(made.tensor, 15));
        made.recipe = nullptr;
      });
}

TEST(ops_under_a_limit) {
  const Settled settled;
  std::vector<at::Tensor> tensors;
  long step = 0;
  Device& device = Program::get().device();
  lms().policy.enable(device, device.use().allocated_bytes + (1 << 20), 4096);
  fail_each(
      [&] {
        if (tensors.empty()) {
          for (int i = 0; i < 24; ++i) {
            tensors.push_back(tensor_of(i));
          }
        }
        ++step;
      },
      [&] { CHECK(holds(tensors[static_cast<size_t>(step) % tensors.size()], step % 24)); },
      [&] {
        for (int i = 0; i < 24; ++i) {
          CHECK(holds(tensors[static_cast<size_t>(i)], i));
        }
      });
  CHECK(lms().pager.stats().pageouts > 0);
  tensors.clear();
}

/// See Note [Ops larger than the limit]
TEST(an_op_that_is_larger_than_the_limit) {
  const Settled settled;
  Device& device = Program::get().device();
  lms().policy.enable(device, device.use().allocated_bytes + (2 << 20), 4096);
  at::Tensor tensor;
  fail_each(
      [&] {
        tensor = at::Tensor();
        tensor = tensor_of(3, 200 * 1024);
      },
      [&] { tensor.add(1); },
      [&] { CHECK(holds(tensor, 3)); });
  CHECK(lms().pager.stats().host_served > 0);
}

/// What `looks_for_the_mutex` knows.
struct Looking {
  at::Tensor tensor;
  bool done = false;
  std::promise<void> had;
  bool free = false;
  std::thread other;
};
Looking* looking = nullptr;

/// While the storage is being held, another thread takes the mutex of who changes the attention.
bool looks_for_the_mutex(const void*) {
  if (!looking->done && looking->tensor.storage().use_count() > 1) {
    looking->done = true;
    looking->other = std::thread([] {
      lms().policy.wakefulness().arm();
      looking->had.set_value();
    });
    const auto had = looking->had.get_future().wait_for(std::chrono::seconds(5));
    looking->free = had == std::future_status::ready;
  }
  return false;
}

/// To hold a storage may take Python's lock, whose holder may wait for the mutex.
TEST(who_falls_asleep_holds_storages_without_the_mutex) {
  const Settled settled;
  Device& device = Program::get().device();
  lms().policy.enable(device, device.use().allocated_bytes + (16 << 20), 4096);
  Looking look;
  looking = &look;
  look.tensor = tensor_of(3);
  may_fail() = &looks_for_the_mutex;
  for (int i = 0; i < 100 && !look.done; ++i) { // a cycle ends at each second call
    const FailingNew watched(1);
    lms().policy.wakefulness().after_op(
        /*on_main_thread=*/true, /*of_program=*/true, /*backward=*/i % 2 == 0);
  }
  may_fail() = nullptr;
  REQUIRE(look.done);
  look.other.join();
  CHECK(look.free);
}

TEST(a_limit_that_is_set) {
  const Settled settled;
  OneTensor one;
  Device& device = Program::get().device();
  fail_each(
      [&] {
        lms().disable();
        one.renew();
        REQUIRE(go_out(one.tensor));
      },
      [&] { lms().policy.enable(device, device.use().allocated_bytes + (1 << 20), 4096); },
      [&] { one.check(); });
}

} // namespace
} // namespace torch_lms
