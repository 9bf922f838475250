#pragma once

#include <unistd.h>

#include <cerrno>
#include <stdexcept>

/// Passed from one process to another that was forked after it was made.
class Baton {
 public:
  Baton() {
    if (pipe(ends_) != 0) {
      throw std::runtime_error("expected to make a pipe");
    }
  }
  ~Baton() {
    close(ends_[0]);
    close(ends_[1]);
  }
  Baton(const Baton&) = delete;
  Baton& operator=(const Baton&) = delete;

  void pass() {
    if (!write_from("")) {
      throw std::runtime_error("expected to write to a pipe");
    }
  }

  /// Writes a byte, whose value does not matter. Returns false if there is none at `data`.
  bool write_from(const void* data) {
    return write(ends_[1], data, 1) == 1;
  }
  void await() {
    char byte = 0;
    while (read(ends_[0], &byte, 1) != 1) {
      if (errno != EINTR) {
        throw std::runtime_error("expected to read from a pipe");
      }
    }
  }

 private:
  int ends_[2];
};
