#pragma once

#include <atomic>
#include <cstdint>

#include <ATen/record_function.h>

#include <extension/access/Frame.h>
#include <extension/base/Interpreter.h>

namespace torch_lms {

/// Note [The program's thread]
/// A cycle is what one thread repeats, with the backwards that it runs: Python's main thread, or
/// the one that has made what the latest backward began with. Others load data and look after
/// things. What they run is no part of a cycle, ends none, and is not looked for in a plan; what
/// they need of what a plan has moved comes back for them as for any op.

/// Whether the thread of `frame`, which is the calling one, is Python's main thread. Blocks on
/// nothing.
inline bool is_on_main_thread(Frame& frame) {
  if (frame.on_main_thread < 0) {
    const auto ask = interpreter().on_main_thread;
    frame.on_main_thread = ask == nullptr || ask() ? 1 : 0;
  }
  return frame.on_main_thread != 0;
}

/// Which ops are the program's.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. Blocks on
/// nothing.
class ProgramThread {
 public:
  /// Besides the main one, by PyTorch's numbers: the one that has made what a backward begins with.
  void note(uint64_t thread) noexcept {
    other_.store(thread, std::memory_order_relaxed);
  }

  /// Whether an op of the calling thread, whose frame it is, is the program's.
  bool runs(Frame& frame, bool backward) const {
    return is_on_main_thread(frame) || backward ||
           other_.load(std::memory_order_relaxed) == at::RecordFunction::currentThreadId();
  }

 private:
  std::atomic<uint64_t> other_{0};
};

} // namespace torch_lms
