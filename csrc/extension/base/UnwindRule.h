#pragma once

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

/// Rules of one thread that are kept; not thread-safe.
class UnwindRules {
 public:
  /// Null if there is none.
  const UnwindRule* find(uintptr_t address) const noexcept {
    const Entry& entry = entries_[slot_of(address)];
    return entry.address == address ? &entry.rule : nullptr;
  }
  void keep(uintptr_t address, const UnwindRule& rule) noexcept {
    entries_[slot_of(address)] = {address, rule};
  }

 private:
  static constexpr size_t kEntries = 512;

  struct Entry {
    uintptr_t address = 0;
    UnwindRule rule;
  };

  static size_t slot_of(uintptr_t address) noexcept {
    return (address ^ address >> 9) % kEntries;
  }

  Entry entries_[kEntries];
};

} // namespace torch_lms
