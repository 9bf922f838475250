#pragma once

#include <cstdint>

namespace torch_lms {

/// Note [Foreign calls]
/// A function of another extension may take a tensor's address and then call PyTorch, which
/// allocates or runs an op, and then use the address. Nothing tells of a const access, and
/// before 2.13 nothing tells of any. So while such a function runs, its thread vacates nothing:
/// no page-out is committed, and where memory is short the limit gives way instead. Nor does it
/// begin a page-out: the function may write through its address when the copy has been made.
///
/// Such a function is found on the stack. Between the innermost frame of the Python interpreter
/// (or the thread's beginning: the autograd engine's threads have none) and the outermost op
/// there are, in all other calls, only functions of PyTorch, of torch_lms and of the C and C++
/// runtimes. An op has pinned what its kernel was given, whoever wrote the kernel.
///
/// What this does not cover: the address of a tensor that *another* thread's op pushes out
/// (README.md, Limits).

/// Whether the calling thread is inside such a function. Takes a microsecond, once in an op, and
/// ten where there are no rules (Note [Frames by rules]): for who is about to vacate memory.
/// Thread-safe; blocks on nothing but the dynamic linker's lock, and that only after a library has
/// been loaded; may be called with and without the GIL.
bool in_foreign_call() noexcept;

/// Note [Functions that call Python]
/// A function may be given an address, call Python, and go on through the address when Python has
/// returned: `torch.tensor` makes a tensor with `empty`, asks each element of its list for a value,
/// which may run ops, and writes that. So what a thread has been given stays not only until its
/// next op, but also while the function that the interpreter had called then waits for Python. It
/// is found by its place on the stack, with the interpreter's frames further in.

/// A function that the interpreter has called, on the calling thread's stack.
struct NativeCall {
  uintptr_t frame = 0; ///< 0 for none.
  uintptr_t function = 0;
};

/// The innermost one, around the outermost op if there is one; none on a thread without Python.
/// Thread-safety and cost are those of `in_foreign_call`, and so are those of the next.
NativeCall innermost_call() noexcept;

/// Whether the function has not returned, and has called Python.
bool waits_for_python(const NativeCall& call) noexcept;

} // namespace torch_lms
