#pragma once

#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <extension/Runtime.h>
#include <extension/memory/CpuDevice.h>

#include "fake_device.h"
#include "torch_harness.h"

// The extension as a program has it, but for the device: LMS_TEST_DEVICE=cpu takes the real one.

/// What `Runtime` needs before it is used, and at the end.
class Program {
 public:
  static Program& get() {
    static Program program;
    return program;
  }

  torch_lms::Runtime& runtime;
  AsyncDevice* const async; ///< Null if the device is the real CPU.

  torch_lms::Device& device() {
    return *runtime.devices.find(c10::Device(c10::kCPU));
  }

 private:
  Program() : runtime(torch_lms::Runtime::get()), async(make_device()) {
    at::set_num_threads(1);
    if (async != nullptr) {
      runtime.devices.put(std::unique_ptr<torch_lms::Device>(async));
    } else {
      static_cast<torch_lms::CpuDevice&>(device()).count();
    }
  }
  ~Program() { // as the module's `shutdown`
    for (auto* queue : {&runtime.pager.out_queue(), &runtime.pager.in_queue()}) {
      queue->start_actions();
      try {
        queue->wait_and_stop_actions();
      } catch (const std::exception&) {
      }
    }
  }
  static AsyncDevice* make_device() {
    const char* kind = std::getenv("LMS_TEST_DEVICE");
    return kind != nullptr && std::strcmp(kind, "cpu") == 0 ? nullptr : new AsyncDevice();
  }
};

inline torch_lms::Runtime& lms() {
  return Program::get().runtime;
}

/// Skips the test where the device is the real CPU: `why` that cannot show it.
inline AsyncDevice& fake_device(const char* why) {
  if (Program::get().async == nullptr) {
    SKIP(why);
  }
  return *Program::get().async;
}

/// Copies to and from the host wait while one of these lives, where the device can.
class HeldCopies {
 public:
  HeldCopies() {
    set(true);
  }
  ~HeldCopies() {
    set(false);
  }
  HeldCopies(const HeldCopies&) = delete;
  HeldCopies& operator=(const HeldCopies&) = delete;

 private:
  static void set(bool held) {
    if (AsyncDevice* device = Program::get().async) {
      device->async->out.set_held(held);
      device->async->in.set_held(held);
    }
  }
};

inline at::Tensor tensor_of(int64_t value, int64_t elements = 8192) {
  Program::get();
  return at::full({elements}, value, at::kLong);
}

/// The entity of its storage, from now on if it had none.
inline torch_lms::EntityPtr tracked(const at::Tensor& tensor) {
  return lms().pager.find_or_track(
      *tensor.storage().unsafeGetStorageImpl(), torch_lms::FoundBy::kHand);
}

/// Ops read the bytes.
inline bool holds(const at::Tensor& tensor, int64_t value) {
  return tensor.eq(value).all().item<bool>();
}

inline std::string state(const at::Tensor& tensor) {
  return lms().manual.state(tensor.storage());
}

inline int64_t page_out(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Storage> storages;
  for (const at::Tensor& tensor : tensors) {
    storages.push_back(tensor.storage());
  }
  return lms().manual.pageout(storages);
}

/// And it is out when this returns.
inline bool go_out(const at::Tensor& tensor) {
  page_out({tensor});
  lms().manual.wait_pageouts();
  return state(tensor) == "paged_out";
}

/// No copies are kept any more: what the end of automatic mode does, on whatever thread.
inline void end_keeping() {
  lms().pager.kept_copies().keep(false);
  lms().pager.kept_copies().unwatch_all();
}

/// While one lives, storages that come in keep their copies on the host.
struct KeepsCopies {
  KeepsCopies() {
    Program::get();
    lms().pager.kept_copies().keep(true);
  }
  ~KeepsCopies() {
    end_keeping();
  }
};

/// Comes in with a copy that is kept.
inline at::Tensor kept_tensor(int64_t value) {
  const at::Tensor tensor = tensor_of(value);
  REQUIRE(go_out(tensor));
  CHECK(holds(tensor, value));
  const torch_lms::EntityPtr entity = lms().pager.find(*tensor.storage().unsafeGetStorageImpl());
  REQUIRE(entity != nullptr && entity->keeps_copy());
  return tensor;
}

inline int64_t prefetch(const at::Tensor& tensor) {
  return lms().manual.prefetch({tensor.storage()}, true);
}

inline void check_nothing_is_pinned() {
  lms().addresses.take_back();
  lms().pager.table().for_each(
      [](const torch_lms::EntityPtr& entity) { CHECK(entity->gone() || !entity->pinned()); });
}

/// At the end of a test nothing is out, pinned, or watched.
inline void settle() {
  lms().addresses.take_back();
  lms().disable();
  check_nothing_is_pinned();
  CHECK_EQ(lms().pager.paged_out_storages(), 0);
  CHECK_EQ(lms().pager.paged_out_bytes(), 0);
  CHECK_EQ(lms().pager.arriving_bytes().load(), 0);
  CHECK_EQ(lms().pager.out_queue().pending_bytes(), 0);
  CHECK_EQ(lms().pager.in_queue().pending_bytes(), 0);
  if (!CHECK(!lms().callbacks.observing())) {
    std::fprintf(
        stderr, "  %s\n", lms().pager.arrivals().any() ? "there are arrivals" : "nothing arrives");
  }
  if (AsyncDevice* device = Program::get().async) {
    device->async->out.wait_until_idle(); // copies that have been called off
    device->async->in.wait_until_idle();
    device->async->collect();
  }
  CHECK_EQ(Program::get().device().pool()->stats().used_bytes, 0);
  lms().pager.stats().reset();
}

/// `settle` when the test ends.
struct Settled {
  Settled() {
    Program::get();
  }
  ~Settled() {
    settle();
  }
};

/// Asks `answer` at each allocation while it lives, whether there are `nbytes`.
class Asked {
 public:
  using Answer = std::function<bool(torch_lms::Device& device, size_t nbytes)>;

  Asked(size_t limit_bytes, Answer answer) : room_(std::move(answer)) {
    Program::get().device().limit(limit_bytes, room_);
  }
  ~Asked() {
    Program::get().device().unlimit();
    if (Program::get().async == nullptr) {
      static_cast<torch_lms::CpuDevice&>(Program::get().device()).count();
    }
  }
  Asked(const Asked&) = delete;
  Asked& operator=(const Asked&) = delete;

 private:
  struct AskingRoom final : torch_lms::Room {
    explicit AskingRoom(Asked::Answer answer) : fits(std::move(answer)) {}
    Answer make_room(torch_lms::Device& device, size_t nbytes) override {
      return fits(device, nbytes) ? Answer::kFits : Answer::kRefuse;
    }
    void make_contiguous(torch_lms::Device&, size_t) override {}
    void allocation_begins(torch_lms::Device&) override {}
    void allocation_ends(torch_lms::Device&) noexcept override {}
    Answer after_out_of_memory(torch_lms::Device&, size_t) override {
      return Answer::kRefuse;
    }
    void vacate_finished(torch_lms::Device&) override {}
    void before_capture() override {}
    std::string explain(torch_lms::Device&, size_t) override {
      return "no room in a test";
    }
    Asked::Answer fits;
  };
  AskingRoom room_;
};

/// Fails when an op has memory brought in for it, as often as it says.
class NoMemory {
 public:
  explicit NoMemory(size_t free_bytes)
      : asked_(
            Program::get().device().use().allocated_bytes + free_bytes,
            [](torch_lms::Device& device, size_t nbytes) {
              return device.use().allocated_bytes + nbytes <= device.limit_bytes();
            }) {}

 private:
  const Asked asked_;
};

/// A record of an op that PyTorch does not know.
class RecordedOp {
 public:
  RecordedOp(const char* name, std::vector<c10::IValue> inputs)
      : inputs_(std::move(inputs)), record_(at::RecordScope::FUNCTION) {
    if (record_.isActive()) {
      record_.before(name, c10::ArrayRef<const c10::IValue>(inputs_.data(), inputs_.size()), -1);
    }
  }

 private:
  std::vector<c10::IValue> inputs_;
  at::RecordFunction record_;
};

inline void in_threads(int count, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int t = 0; t < count; ++t) {
    threads.emplace_back([&body, t] {
      try {
        body(t);
      } catch (const std::exception& error) {
        harness::report(false, "in a thread", t, error.what());
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}
