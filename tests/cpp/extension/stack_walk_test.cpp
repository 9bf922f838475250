// The stack by rules that are kept is the stack that the runtime's unwinder finds.

#include <extension/base/StackWalk.h>

#include <alloca.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <initializer_list>
#include <thread>
#include <vector>

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/variable.h>

#include "rig.h"

namespace torch_lms {
namespace {

using Frames = std::vector<StackFrame>;

bool collect(const StackFrame& frame, void* context) {
  static_cast<Frames*>(context)->push_back(frame);
  return true;
}

uintptr_t generated = 0; // a page of code that is replaced

bool lasts(uintptr_t address, void*) {
  return address - generated >= 4096;
}

bool alike(const StackFrame& one, const StackFrame& other) {
  return one.call == other.call && one.stack == other.stack && one.function == other.function;
}

/// Whether there are rules for the whole stack, and these find it.
struct Compared {
  bool whole = false;
  bool same = false;
  size_t frames = 0;
};

__attribute__((noinline)) Compared compare() {
  Frames by_rules;
  Frames by_unwinder;
  Compared found;
  found.whole = walk_stack_by_rules(&collect, &lasts, &by_rules);
  walk_stack_by_unwinder(&collect, &by_unwinder);
  found.frames = by_rules.size();
  // The calls in this function are at two places of it.
  found.same = by_rules.size() <= by_unwinder.size() && !by_rules.empty() &&
               by_rules[0].function == by_unwinder[0].function &&
               std::equal(by_rules.begin() + 1, by_rules.end(), by_unwinder.begin() + 1, &alike) &&
               (!found.whole || by_rules.size() == by_unwinder.size());
  return found;
}

#if defined(__x86_64__)
constexpr bool kHasRules = true;
#else
constexpr bool kHasRules = false;
#endif

TEST(a_plain_stack_is_found_by_rules) {
  const Compared found = compare();
  CHECK_EQ(found.whole, kHasRules);
  CHECK_EQ(found.same, kHasRules);
}

__attribute__((noinline)) size_t deeper(int depth, size_t nbytes) {
  char* const own = static_cast<char*>(alloca(nbytes)); // a frame that is as long as it is told
  std::memset(own, depth, nbytes);
  if (depth == 0) {
    const Compared found = compare();
    CHECK_EQ(found.whole, kHasRules);
    CHECK_EQ(found.same, kHasRules);
    return found.frames + static_cast<size_t>(own[0]);
  }
  return deeper(depth - 1, nbytes * 3 % 1000 + 16) + static_cast<size_t>(own[nbytes - 1] == depth);
}

TEST(frames_of_any_length_are_found) {
  for (size_t nbytes = 16; nbytes < 600; nbytes += 48) {
    CHECK(deeper(40, nbytes) >= (kHasRules ? 80 : 40));
  }
}

TEST(a_threads_first_frame_is_the_end) {
  Compared found;
  std::thread other([&] { found = compare(); });
  other.join();
  CHECK_EQ(found.whole, kHasRules);
  CHECK_EQ(found.same, kHasRules);
}

#if defined(__x86_64__)

extern "C" void __register_frame(void* section);
extern "C" void __deregister_frame(void* section);

Compared in_generated;

void compare_in_generated() {
  in_generated = compare();
}

/// A function that calls its argument from a frame of `own_bytes`, and what compilers write of it.
class Generated {
 public:
  Generated(uint8_t* page, uint8_t own_bytes) {
    const uint8_t code[] = {
        0x48, 0x83, 0xec, own_bytes, 0xff, 0xd7, 0x48, 0x83, 0xc4, own_bytes, 0xc3};
    std::memcpy(page, code, sizeof code);
    put<uint32_t>(20); // what functions have in common, until `kCommonBytes`
    put<uint32_t>(0);
    put<uint8_t>({1, 0, 1, 0x78, 16}); // version, nothing added, units, where it returns to
    put<uint8_t>({0x0c, 7, 8, 0x90, 1}); // the caller's stack, and the address of the return
    at_ = kCommonBytes;
    put<uint32_t>(28);
    put<uint32_t>(kCommonBytes + 4);
    put<uint64_t>(reinterpret_cast<uint64_t>(page));
    put<uint64_t>(sizeof code);
    put<uint8_t>({0x44, 0x0e, static_cast<uint8_t>(own_bytes + 8), 0x46, 0x0e, 8});
    __register_frame(section_);
  }
  ~Generated() {
    __deregister_frame(section_);
  }

 private:
  static constexpr size_t kCommonBytes = 24;

  template <typename T>
  void put(T value) {
    std::memcpy(section_ + at_, &value, sizeof value);
    at_ += sizeof value;
  }
  template <typename T>
  void put(std::initializer_list<T> values) {
    for (const T value : values) {
      put(value);
    }
  }

  alignas(8) uint8_t section_[96] = {};
  size_t at_ = 0;
};

TEST(code_that_is_replaced_is_looked_at_anew) {
  void* const page =
      ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) {
    return; // the system lets nobody generate code
  }
  generated = reinterpret_cast<uintptr_t>(page);
  for (const uint8_t own_bytes : {0x08, 0x28, 0x18}) {
    const Generated code(static_cast<uint8_t*>(page), own_bytes);
    reinterpret_cast<void (*)(void (*)())>(page)(&compare_in_generated); // NOLINT
    CHECK(in_generated.whole);
    CHECK(in_generated.same);
  }
  ::munmap(page, 4096);
  generated = 0;
}

#endif

bool count_address(uintptr_t, void* context) {
  ++*static_cast<int*>(context);
  return false;
}

TEST(what_may_go_is_asked_for_each_time) {
  int asked = 0;
  const auto visit = [](const StackFrame&, void*) { return true; };
  walk_stack_by_rules(visit, &count_address, &asked); // some may have been kept by `compare`
  const int first = asked;
  walk_stack_by_rules(visit, &count_address, &asked);
  CHECK(asked > first || !kHasRules);
  CHECK(std::abs(asked - 2 * first) <= 1); // the calls here are at two places
}

Compared at_end;

/// Walks when what the thread has kept is gone.
struct WalksAtEnd {
  ~WalksAtEnd() {
    at_end = compare();
  }
};

TEST(a_thread_that_ends_walks_without_what_it_kept) {
  std::thread([] {
    static thread_local WalksAtEnd first; // made before, destroyed after
    static_cast<void>(&first);
    CHECK_EQ(compare().whole, kHasRules);
  }).join();
  CHECK(!at_end.whole);
}

TEST(an_exception_passes_through) {
  int frames = 0;
  const auto second = [](const StackFrame&, void* context) -> bool {
    if (++*static_cast<int*>(context) == 2) {
      throw std::bad_alloc();
    }
    return true;
  };
  bool thrown = false;
  try {
    walk_stack_by_rules(second, &lasts, &frames);
  } catch (const std::bad_alloc&) {
    thrown = true;
  }
  CHECK_EQ(thrown, kHasRules);
  CHECK(compare().same == kHasRules); // nothing is left of it
}

std::atomic<int> ops{0};
std::atomic<int> whole{0};
std::atomic<int> wrong{0};

void look() {
  const Compared found = compare();
  ++ops;
  whole += found.whole;
  wrong += !found.same && kHasRules;
}

std::unique_ptr<at::ObserverContext> op_begins(const at::RecordFunction&) {
  look();
  return nullptr;
}

void op_ends(const at::RecordFunction&, at::ObserverContext*) {
  look();
}

TEST(ops_and_their_backward_are_found) {
  const auto handle = at::addGlobalCallback(
      at::RecordFunctionCallback(op_begins, op_ends).scopes({at::RecordScope::FUNCTION}));
  at::Tensor weight = at::ones({8, 8}).requires_grad_();
  at::Tensor y = weight;
  for (int i = 0; i < 10; ++i) {
    y = at::mm(y, weight).tanh();
  }
  y.sum().backward();
  std::thread([&] { at::mm(y.detach(), y.detach()).softmax(0); }).join();
  at::removeCallback(handle);
  CHECK(ops > 100);
  CHECK_EQ(wrong.load(), 0);
  CHECK(!kHasRules || 10 * whole > 9 * ops);
}

} // namespace
} // namespace torch_lms
