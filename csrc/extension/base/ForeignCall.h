#pragma once

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

/// Whether the calling thread is inside such a function. Takes microseconds: for who is about
/// to vacate memory. Thread-safe; blocks on nothing but the dynamic linker's lock, and that only
/// after a library has been loaded; may be called with and without the GIL.
bool in_foreign_call() noexcept;

} // namespace torch_lms
