// Threads that page out, compute, prefetch, free, resize and share storages, in automatic mode and
// by hand, for as many seconds as LMS_STRESS_SECONDS says (default 10). Every value is checked.

#include <entity/Error.h>
#include <extension/base/Compat.h>

#include <array>
#include <random>

#include "made.h"

namespace torch_lms {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kThreads = 8;
constexpr size_t kShared = 24;
constexpr std::chrono::seconds kMostSeconds(120); // beyond those that were asked for

/// A tensor, and what it holds: the program's own order of what it does to it.
struct Slot {
  std::mutex mutex;
  at::Tensor tensor;
  int64_t value = 0;
};

class Stress {
 public:
  Stress() {
    const char* seconds = std::getenv("LMS_STRESS_SECONDS");
    seconds_ = seconds != nullptr ? std::atoi(seconds) : 10;
    alarm(static_cast<unsigned>(seconds_) + 240);
    for (Slot& slot : slots_) {
      renew(slot, 1);
    }
  }

  void run() {
    // An op that began while nobody observed ops is not known to a page-out by hand that another
    // thread asks for: see `OpCallbacks`.
    const OpCallbacks::Request request(lms().callbacks);
    end_ = Clock::now() + std::chrono::seconds(seconds_);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([this, t] { work(static_cast<unsigned>(t)); });
    }
    std::thread changes([this] { change_modes(); });
    for (std::thread& thread : threads) {
      thread.join();
    }
    changes.join();
    wait_for_transfers();
    for (Slot& slot : slots_) {
      check(slot);
      slot.tensor = at::Tensor();
    }
    std::printf(
        "%ld ops, %ld out, %ld dropped bytes, %ld in, %ld in place, %ld called off, %ld refused "
        "... ",
        static_cast<long>(ops_),
        static_cast<long>(lms().pager.stats().pageouts),
        static_cast<long>(lms().pager.stats().dropped_bytes),
        static_cast<long>(lms().pager.stats().pageins),
        static_cast<long>(lms().pager.stats().host_served),
        static_cast<long>(lms().pager.stats().cancelled_pageouts),
        static_cast<long>(refused_));
    CHECK(tested());
  }

 private:
  /// A busy machine gets more time, until something has been tested.
  bool over() {
    const auto now = Clock::now();
    return harness::failures() != 0 || (now >= end_ && (tested() || now >= end_ + kMostSeconds));
  }

  static bool tested() {
    const Stats& stats = lms().pager.stats();
    return stats.pageouts > 20 && stats.pageins > 20 && stats.recomputations > 20;
  }

  static void renew(Slot& slot, int64_t value) {
    slot.value = value;
    slot.tensor = tensor_of(value, 1024 << (value % 6));
  }

  void work(unsigned seed) {
    std::mt19937 random(seed + 1);
    while (!over()) {
      try {
        step(random);
        ++ops_;
      } catch (const c10::OutOfMemoryError&) {
        ++refused_;
      } catch (const PageoutRefused&) { // held, or given out
      } catch (const Error& error) {
        failed(error.what());
      } catch (const std::exception& error) {
        // PyTorch itself tells an op that what has been dropped found no room.
        if (std::string(error.what()).find("expected room in") == std::string::npos) {
          harness::report(false, "stress", 0, error.what());
        } else {
          ++refused_;
        }
      }
    }
  }

  /// Says what it found, if it is wrong.
  static void check(const Slot& slot) {
    if (!CHECK(holds(slot.tensor, slot.value))) {
      const auto* data = slot.tensor.const_data_ptr<int64_t>();
      int64_t wrong = 0;
      while (wrong + 1 < slot.tensor.numel() && data[wrong] == slot.value) {
        ++wrong;
      }
      std::fprintf(
          stderr,
          "  of %ld elements the %ld-th is %ld instead of %ld; it is %s\n",
          static_cast<long>(slot.tensor.numel()),
          static_cast<long>(wrong),
          static_cast<long>(data[wrong]),
          static_cast<long>(slot.value),
          state(slot.tensor).c_str());
    }
  }

  /// Copies fail where the test makes them fail.
  void failed(const char* what) {
    if (std::string(what).find("fake device") == std::string::npos &&
        std::string(what).find("being waited for") == std::string::npos) {
      harness::report(false, "stress", 0, what);
    }
  }

  void step(std::mt19937& random) {
    Slot& slot = slots_[random() % kShared];
    switch (random() % 20) {
      case 0: {
        std::lock_guard<std::mutex> lock(slot.mutex);
        at::Tensor fresh = tensor_of(0, 1024 << (random() % 6));
        slot.tensor = std::move(fresh); // frees it wherever its bytes are
        slot.value = 0;
        return;
      }
      case 1: {
        std::lock_guard<std::mutex> lock(slot.mutex);
        const int64_t before = slot.tensor.numel();
        const int64_t wanted = 1024 << (random() % 6);
        try {
          slot.tensor.resize_({wanted});
        } catch (const c10::OutOfMemoryError&) { // PyTorch has set the sizes by then
          slot.tensor.unsafeGetTensorImpl()->set_sizes_contiguous({before});
          throw;
        }
        if (wanted > before) {
          slot.tensor.slice(0, before).fill_(slot.value);
        }
        return;
      }
      case 2:
      case 3:
      case 4: {
        std::lock_guard<std::mutex> lock(slot.mutex);
        slot.tensor.add_(1);
        ++slot.value;
        check(slot);
        return;
      }
      case 5: { // through an address
        std::lock_guard<std::mutex> lock(slot.mutex);
        if (compat::kHasMaterializer) {
          // Nothing tells of the access while nothing is out: other threads may page it out.
          const c10::Storage storage = slot.tensor.storage();
          lms().manual.pin(storage);
          auto* data = slot.tensor.mutable_data_ptr<int64_t>();
          ++slot.value;
          for (int64_t i = 0; i < slot.tensor.numel(); ++i) {
            data[i] = slot.value;
          }
          lms().manual.unpin(storage);
          if (random() % 2 == 0) {
            lms().addresses.take_back();
          }
        }
        return;
      }
      case 6: { // by several threads at once: nobody writes it meanwhile
        std::pair<at::Tensor, int64_t> seen = copy_of(slot);
        Slot& other = slots_[random() % kShared];
        const std::pair<at::Tensor, int64_t> also = copy_of(other);
        if (seen.first.numel() == also.first.numel()) {
          const at::Tensor sum = seen.first.add(also.first);
          CHECK(holds(sum, seen.second + also.second));
        }
        return;
      }
      case 7: {
        const c10::Storage storage = storage_of(slot);
        Pinned held;
        lms().addresses.hold({storage}, held);
        std::this_thread::yield();
        lms().addresses.release(held);
        return;
      }
      case 8:
        lms().pager.commit_finished();
        return;
      case 9:
        if (random() % 8 == 0) {
          wait_for_transfers();
        }
        return;
      case 10:
        if (random() % 4 == 0) {
          lms().pager.requests().cancel_prefetches();
          lms().pager.requests().cancel_last_prefetch();
        }
        return;
      case 11:
      case 12:
      case 13: {
        std::vector<c10::Storage> storages;
        for (int i = 0; i < 3; ++i) {
          storages.push_back(storage_of(slots_[random() % kShared]));
        }
        lms().manual.pageout(storages);
        return;
      }
      case 14: { // what others read and write meanwhile is dropped
        const OpCallbacks::Request request(lms().callbacks); // as where plans are carried out
        std::lock_guard<std::mutex> lock(slot.mutex);
        const at::Tensor before = slot.tensor;
        Made made = made_by([&] { return before.mul(1); });
        slot.tensor = made.tensor;
        made.drop();
        return;
      }
      case 15:
        lms().manual.prefetch({storage_of(slot)}, true);
        return;
      default: {
        std::lock_guard<std::mutex> lock(slot.mutex);
        check(slot);
      }
    }
  }

  /// The slot's tensor is read by many threads, and replaced by nobody who still reads it.
  std::pair<at::Tensor, int64_t> copy_of(Slot& slot) {
    std::lock_guard<std::mutex> lock(slot.mutex);
    return {slot.tensor.clone(), slot.value};
  }

  c10::Storage storage_of(Slot& slot) {
    std::lock_guard<std::mutex> lock(slot.mutex);
    return slot.tensor.storage();
  }

  void wait_for_transfers() {
    try {
      lms().manual.wait_pageouts();
      lms().manual.wait_pageins();
    } catch (const TransferFailed& error) {
      failed(error.what());
    } catch (const Error& error) { // stopped meanwhile
      failed(error.what());
    }
  }

  void change_modes() {
    std::mt19937 random(99);
    while (!over()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20 + random() % 60));
      try {
        switch (random() % 4) {
          case 0:
            lms().disable();
            break;
          case 1:
            if (AsyncDevice* device = Program::get().async) {
              CopyEngine& engine = random() % 2 == 0 ? device->async->out : device->async->in;
              engine.set_slow(random() % 2 == 0);
              if (random() % 2 == 0) {
                device->async->out.fail_next(); // a page-in that fails loses nothing either
              }
            }
            break;
          default:
            lms().policy.enable(
                Program::get().device(), (3 + random() % 4) << 20, 1 << (12 + random() % 4));
        }
      } catch (const Error& error) {
        failed(error.what());
      } catch (const c10::OutOfMemoryError&) {
      }
    }
  }

  int seconds_ = 10;
  Clock::time_point end_;
  std::array<Slot, kShared> slots_;
  std::atomic<int64_t> ops_{0};
  std::atomic<int64_t> refused_{0};
};

TEST(threads_do_everything_at_once) {
  Program::get();
  {
    Stress stress;
    stress.run();
  }
  try {
    lms().pager.wait_pageouts(); // what failed is told once
  } catch (const TransferFailed&) {
  }
  settle();
}

} // namespace
} // namespace torch_lms
