#pragma once

#include <thread>

#include <entity/OpClock.h>

#include "interruptions.h"

/// An op of another thread, which runs until it is told to end.
class OtherOp {
 public:
  OtherOp()
      : thread_([this] {
          torch_lms::OpClock::get().begin_op();
          gate_.pass();
          torch_lms::OpClock::get().end_op();
        }) {
    gate_.wait_until_reached();
  }
  ~OtherOp() {
    end();
  }
  void end() {
    gate_.open();
    if (thread_.joinable()) {
      thread_.join();
    }
  }

 private:
  Gate gate_;
  std::thread thread_;
};
