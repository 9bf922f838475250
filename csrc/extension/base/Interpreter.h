#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>

namespace torch_lms {

/// Where the Python code of the other threads was at one moment. Made, asked and destroyed with
/// Python's lock.
class PlacesOfThreads {
 public:
  virtual ~PlacesOfThreads() = default;
  /// Adds the threads, by the numbers that the system gives them, that are in no call that they
  /// were in then: that have gone on since, have ended, or were where Python calls nothing. Those
  /// that are in `past` are not looked at.
  virtual void add_moved(std::set<uint64_t>& past) const = 0;
  /// Whether a thread is one of Python's, as each is that wants its lock.
  virtual bool knows(uint64_t thread) const = 0;
};

/// What other parts need of Python. The module's initialization fills it in; a program without
/// an interpreter leaves it as it is.
struct Interpreter {
  /// Lets go of Python's lock if the calling thread holds it; null if it does not. Else what
  /// `take_lock` takes.
  void* (*release_lock)() = nullptr;
  void (*take_lock)(void* state) = nullptr;
  /// Takes Python's lock whether the calling thread holds it or not; what `let_go` is told.
  int (*hold)() = nullptr;
  void (*let_go)(int state) = nullptr;
  std::unique_ptr<PlacesOfThreads> (*note_places)() = nullptr;
  /// Whether an address is of Python's own data, where its lock is; null where nobody knows.
  bool (*owns_address)(uintptr_t address) = nullptr;
  /// Has `call` run by Python's main thread between two of its instructions, soon.
  /// False if Python cannot now.
  bool (*at_next_instruction)(void (*call)()) = nullptr;
  /// Has Python make a plan of what has been recorded, soon.
  void (*make_plan)() = nullptr;
  /// The module and the line of the program that the calling thread is at; empty where there is
  /// none.
  std::pair<std::string, std::string> (*where)() = nullptr;
  /// Whether the calling thread is Python's main thread.
  bool (*on_main_thread)() = nullptr;
  /// Whether the calling thread is known to Python: one that a C++ library has started is not.
  bool (*on_python_thread)() = nullptr;
};

Interpreter& interpreter() noexcept;

/// Python's lock is not held while one of these lives: for who waits, since what is waited for
/// may need it.
class WithoutGil {
 public:
  WithoutGil() : state_(interpreter().release_lock ? interpreter().release_lock() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) {
      interpreter().take_lock(state_);
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* const state_;
};

/// Python's lock is held while one of these lives: no other thread of Python's begins anything.
class WithGil {
 public:
  WithGil() : state_(interpreter().hold ? interpreter().hold() : 0) {}
  ~WithGil() {
    if (interpreter().let_go) {
      interpreter().let_go(state_);
    }
  }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  const int state_;
};

} // namespace torch_lms
