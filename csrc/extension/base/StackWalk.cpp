#include <extension/base/StackWalk.h>

#include <unwind.h>

#include <new>
#include <utility>

#include <extension/base/UnwindRule.h>

namespace torch_lms {
namespace {

thread_local UnwindRules* kept_rules = nullptr;
thread_local bool thread_ends = false;

/// Threads walk their stacks also while what they own is destroyed.
struct EndOfThread {
  ~EndOfThread() {
    delete std::exchange(kept_rules, nullptr);
    thread_ends = true;
  }
};

/// The calling thread's, which are too large for its own block; null for want of memory, and at its
/// end.
UnwindRules* rules_of_thread() {
  if (kept_rules == nullptr && !thread_ends) {
    static thread_local EndOfThread end;
    static_cast<void>(end); // which makes it
    kept_rules = new (std::nothrow) UnwindRules();
  }
  return kept_rules;
}

/// Of the stack, whatever a sanitizer knows of it.
__attribute__((no_sanitize("address", "thread"))) uintptr_t word_at(uintptr_t address) {
  return *reinterpret_cast<const volatile uintptr_t*>(address); // NOLINT
}

/// Where a function's frame ends, and what it has in registers.
struct Place {
  uintptr_t returns_to; // 0: nowhere
  uintptr_t stack;
  uintptr_t frame_pointer;

  /// To the caller's. False if that lies on a stack of its own, or something is wrong.
  bool leave(const UnwindRule& rule) {
    const bool by_stack = rule.base == UnwindRule::Base::kStackPointer;
    const uintptr_t callers =
        (by_stack ? stack : frame_pointer) + static_cast<intptr_t>(rule.to_callers_stack);
    if (callers <= stack || callers % sizeof callers != 0) {
      return false;
    }
    if (rule.saves_frame_pointer) {
      frame_pointer = word_at(callers + static_cast<intptr_t>(rule.to_frame_pointer));
    }
    returns_to = word_at(callers - sizeof callers);
    stack = callers;
    return true;
  }
};

} // namespace

__attribute__((noinline)) bool walk_stack_by_rules(
    StackVisitor visit,
    CodeLasts lasts,
    void* context) {
  UnwindRules* const rules = rules_of_thread();
  if (rules == nullptr) {
    return false;
  }
  // A function that asks for its frame has a frame pointer, with the caller's and the address of
  // the return at it.
  const auto own = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  Place place{word_at(own + sizeof own), own + 2 * sizeof own, word_at(own)};
  while (place.returns_to != 0) {
    const uintptr_t call = place.returns_to - 1; // what follows it may be another function
    const UnwindRule* const kept = rules->find(call);
    const UnwindRule rule = kept != nullptr ? *kept : unwind_rule_at(call);
    if (rule.base == UnwindRule::Base::kNone) {
      return false;
    }
    if (kept == nullptr && lasts(call, context)) {
      rules->keep(call, rule);
    }
    if (!visit({call, place.stack, rule.function}, context) ||
        rule.base == UnwindRule::Base::kEnd) {
      return true;
    }
    if (!place.leave(rule)) {
      return false;
    }
  }
  return true;
}

__attribute__((noinline)) void walk_stack_by_unwinder(StackVisitor visit, void* context) {
  struct Visit {
    StackVisitor visit;
    void* context;
    bool is_own; // the frame of this function, which comes first
  };
  Visit given{visit, context, true};
  _Unwind_Backtrace(
      [](_Unwind_Context* frame, void* context) {
        auto& given = *static_cast<Visit*>(context);
        if (std::exchange(given.is_own, false) || _Unwind_GetIP(frame) == 0) {
          return _URC_NO_REASON;
        }
        const StackFrame found{
            _Unwind_GetIP(frame) - 1, _Unwind_GetCFA(frame), _Unwind_GetRegionStart(frame)};
        return given.visit(found, given.context) ? _URC_NO_REASON : _URC_END_OF_STACK;
      },
      &given);
}

} // namespace torch_lms
