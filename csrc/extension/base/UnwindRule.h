#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace torch_lms {

/// Note [Frames by rules]
/// The runtime's unwinder reads and carries out, for each frame, what the compiler has written of
/// the function (.eh_frame): about a thousand instructions, and a stack has forty frames or more.
/// At one address of the code it comes to the same each time: where the caller's part of the stack
/// begins, as an offset from one of two registers, and where the frame pointer was saved. That is
/// kept, and a frame takes some twenty instructions then. What does not come to that is left to the
/// runtime's unwinder: a rule is the same as it goes by, or there is none. Where code may go, and
/// other code come, nothing is kept.

/// How a function's caller is found, while the function is at one address of its code.
struct UnwindRule {
  enum class Base : uint8_t {
    kNone, ///< There is no such rule.
    kEnd, ///< It has no caller.
    kStackPointer,
    kFramePointer,
  };

  Base base = Base::kNone;
  bool saves_frame_pointer = false; ///< Else the caller's is the function's.
  int32_t to_callers_stack = 0; ///< From the base; the return address is just below.
  int32_t to_frame_pointer = 0; ///< From the caller's stack to where it was saved.
  uintptr_t function = 0; ///< Where its code begins.
};

/// The rule at an address, from what the compiler has written (x86-64; elsewhere there are none).
/// Thread-safe; blocks on nothing that the runtime's unwinder does not.
UnwindRule unwind_rule_at(uintptr_t address) noexcept;

/// Rules of one thread that are kept; not thread-safe. A stack has some hundred addresses at most.
class UnwindRules {
 public:
  /// Null if there is none.
  const UnwindRule* find(uintptr_t address) const noexcept {
    for (const Entry& entry : sets_[set_of(address)]) {
      if (entry.address == address) {
        return &entry.rule;
      }
    }
    return nullptr;
  }
  /// In the place of the oldest of its set.
  void keep(uintptr_t address, const UnwindRule& rule) noexcept {
    Entry* const set = sets_[set_of(address)];
    std::move_backward(set, set + kWays - 1, set + kWays);
    set[0] = {address, rule};
  }

 private:
  static constexpr unsigned kBits = 7;
  static constexpr size_t kWays = 4;

  struct Entry {
    uintptr_t address = 0;
    UnwindRule rule;
  };

  static size_t set_of(uintptr_t address) noexcept {
    return static_cast<size_t>(address * UINT64_C(0x9e3779b97f4a7c15) >> (64 - kBits)); // mixed
  }

  Entry sets_[size_t{1} << kBits][kWays];
};

} // namespace torch_lms
