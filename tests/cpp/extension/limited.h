#pragma once

#include "rig.h"

// A program under a limit.

constexpr size_t kMiB = size_t{1} << 20;
constexpr int64_t kElements = 32768; // of a tensor of 256 KiB
constexpr size_t kNbytes = kElements * 8;

inline size_t allocated() {
  return Program::get().device().use().allocated_bytes;
}

/// Automatic mode with so much beyond what is in use already.
struct Limited : Settled {
  explicit Limited(size_t bytes) : limit_bytes(allocated() + bytes) {
    Program::get().device().reset_peak();
    lms().policy.enable(Program::get().device(), limit_bytes, 4096);
  }
  bool kept() const {
    return Program::get().device().use().peak_allocated_bytes <= limit_bytes;
  }
  const size_t limit_bytes;
};

inline int64_t pageouts() {
  return lms().pager.stats().pageouts.load() +
         lms().pager.stats().dropped_bytes.load() / static_cast<int64_t>(kNbytes);
}
