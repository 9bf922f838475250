#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <ATen/Context.h>
#include <c10/core/ScalarType.h>

namespace torch_lms {

/// The switches of PyTorch that change which numbers an op makes: those of the process, and of the
/// calling thread's processor.
///
/// Thread-safe. Blocks on nothing. While a `WithNumericState` lives, ops of other threads see
/// its switches, too, where they differ from the program's.
struct NumericState {
  c10::ScalarType default_dtype = c10::ScalarType::Float;
  /// Of CUDA and oneDNN, for convolutions, recurrent layers and matrix products each. The older
  /// switches set these, too, and cannot be read once a program has set one of these.
  std::array<at::Float32Precision, 6> float32{};
  bool mkldnn = true;
  bool cudnn = true;
  bool cudnn_deterministic = false;
  bool cudnn_benchmark = false;
  bool deterministic = false;
  bool deterministic_warns = false;
  int threads = 1; ///< They divide sums.
  uint32_t processor = 0; ///< How it rounds, and whether it keeps denormal numbers.

  static NumericState now();
  bool operator==(const NumericState& other) const;
  size_t hash() const;

  void set() const;
};

/// The switches are as in `state` while it lives.
class WithNumericState {
 public:
  explicit WithNumericState(const NumericState& state);
  ~WithNumericState();
  WithNumericState(const WithNumericState&) = delete;
  WithNumericState& operator=(const WithNumericState&) = delete;

 private:
  const NumericState before_;
  const bool differs_;
};

} // namespace torch_lms
