#pragma once

#include <cstdint>

namespace torch_lms {

/// A function's frame on the calling thread's stack.
struct StackFrame {
  uintptr_t call; ///< An address in the call that has not returned.
  uintptr_t stack; ///< Where its part of the stack ended when it called.
  uintptr_t function; ///< Where its code begins.
};

/// Whether the walk is to go on. Walks no stack itself.
using StackVisitor = bool (*)(const StackFrame& frame, void* context);

/// Whether what lies at an address of the code stays for as long as the process lives.
using CodeLasts = bool (*)(uintptr_t address, void* context);

/// Calls `visit` for each frame from the inside out, its caller's first, for as long as it returns
/// true. By rules that are kept (Note [Frames by rules]): false if it has met a frame that has
/// none, and has not gone on. Thread-safe; throws what `visit` and `lasts` throw.
bool walk_stack_by_rules(StackVisitor visit, CodeLasts lasts, void* context);

/// The same by the runtime's unwinder, which knows more frames, and takes twenty times as long.
void walk_stack_by_unwinder(StackVisitor visit, void* context);

} // namespace torch_lms
