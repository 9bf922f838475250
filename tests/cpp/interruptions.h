#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

/// What a test has a fake do in the middle of its steps: throw, wait at a gate, or call
/// the object under test. Thread-safe.
template <class Step>
class Interruptions {
 public:
  /// The next time that `step` is reached, `action` runs, once.
  void at(Step step, std::function<void()> action) {
    std::lock_guard<std::mutex> lock(mutex_);
    actions_[step] = std::move(action);
  }

  /// Called by the fake, which holds no lock.
  void reached(Step step) {
    std::function<void()> action;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++count_[step];
      const auto found = actions_.find(step);
      if (found == actions_.end()) {
        return;
      }
      action = std::move(found->second);
      actions_.erase(found);
    }
    action();
  }

  /// How often `step` was reached.
  int count(Step step) {
    std::lock_guard<std::mutex> lock(mutex_);
    return count_[step];
  }

 private:
  std::mutex mutex_;
  std::map<Step, std::function<void()>> actions_;
  std::map<Step, int> count_;
};

/// An action that throws.
template <class Exception>
std::function<void()> throwing(const std::string& message) {
  return [message] { throw Exception(message); };
}

/// A place where one thread stops until another lets it go on.
class Gate {
 public:
  /// Stops the calling thread until `open`.
  void pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    reached_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
  }
  void wait_until_reached() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
  }
  void open() {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

  /// An action that passes the gate.
  std::function<void()> action() {
    return [this] { pass(); };
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  bool open_ = false;
};
