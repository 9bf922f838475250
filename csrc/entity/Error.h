#pragma once

#include <stdexcept>
#include <string>

namespace torch_lms {

/// Base of the errors of paging. Each message says what was expected, what was
/// found and what to do.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The limit of the host memory for paged-out bytes is reached.
class HostPoolFull : public Error {
 public:
  using Error::Error;
};

/// The directory for spill files is missing, full or not writable.
class SpillFailed : public Error {
 public:
  using Error::Error;
};

/// A copy, or a call of the device's runtime, failed.
class TransferFailed : public Error {
 public:
  using Error::Error;
};

/// A prefetch found no room on the device. Not an error for anybody: the storage
/// stays on the host.
class NoRoom : public Error {
 public:
  using Error::Error;
};

/// The storage cannot be paged out.
class PageoutRefused : public Error {
 public:
  using Error::Error;
};

} // namespace torch_lms
