#include <extension/base/StackWalk.h>

#include <link.h>
#include <unwind.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include <extension/base/UnwindRule.h>

namespace torch_lms {
namespace {

/// Libraries that have been unloaded so far: where one was there may be another since.
unsigned long long unloaded_libraries() {
  unsigned long long count = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t nbytes, void* context) {
        if (nbytes >= offsetof(dl_phdr_info, dlpi_subs) + sizeof info->dlpi_subs) {
          *static_cast<unsigned long long*>(context) = info->dlpi_subs;
        }
        return 1; // all say the same
      },
      &count);
  return count;
}

struct KeptRules {
  UnwindRules rules;
  unsigned long long unloaded = 0;
};

/// The calling thread's; null for want of memory.
UnwindRules* kept_rules() {
  static thread_local std::unique_ptr<KeptRules> kept; // too large for a thread's own block
  const unsigned long long unloaded = unloaded_libraries();
  if (kept == nullptr || kept->unloaded != unloaded) {
    kept.reset(new (std::nothrow) KeptRules());
    if (kept == nullptr) {
      return nullptr;
    }
    kept->unloaded = unloaded;
  }
  return &kept->rules;
}

/// Of the stack, whatever a sanitizer knows of it.
__attribute__((no_sanitize("address", "thread"))) uintptr_t word_at(uintptr_t address) {
  return *reinterpret_cast<const volatile uintptr_t*>(address); // NOLINT
}

} // namespace

__attribute__((noinline)) bool walk_stack_by_rules(StackVisitor visit, void* context) {
  UnwindRules* const rules = kept_rules();
  if (rules == nullptr) {
    return false;
  }
  // A function that asks for its frame has a frame pointer, with the caller's and the address of
  // the return at it.
  const auto own = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  uintptr_t frame_pointer = word_at(own);
  StackFrame frame{word_at(own + sizeof own), own + 2 * sizeof own, 0};
  for (;;) {
    const UnwindRule rule = rules->at(frame.address - 1); // of the call, not of what follows it
    if (rule.base == UnwindRule::Base::kNone) {
      return false;
    }
    frame.function = rule.function;
    if (!visit(frame, context) || rule.base == UnwindRule::Base::kEnd) {
      return true;
    }
    const bool by_stack = rule.base == UnwindRule::Base::kStackPointer;
    const uintptr_t callers =
        (by_stack ? frame.stack : frame_pointer) + static_cast<intptr_t>(rule.to_callers_stack);
    if (callers <= frame.stack || callers % sizeof callers != 0) {
      return false; // a stack of its own, or something is wrong
    }
    if (rule.saves_frame_pointer) {
      frame_pointer = word_at(callers + static_cast<intptr_t>(rule.to_frame_pointer));
    }
    frame.address = word_at(callers - sizeof callers);
    frame.stack = callers;
    if (frame.address == 0) {
      return true;
    }
  }
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
            _Unwind_GetIP(frame), _Unwind_GetCFA(frame), _Unwind_GetRegionStart(frame)};
        return given.visit(found, given.context) ? _URC_NO_REASON : _URC_END_OF_STACK;
      },
      &given);
}

} // namespace torch_lms
