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
  /// What is seen by all; by all of CUDA and of oneDNN; by their convolutions, recurrent layers and
  /// matrix products. The older switches set these, too, and cannot be read once a program has set
  /// one of these.
  using Float32 = std::array<at::Float32Precision, 9>;

  c10::ScalarType default_dtype = c10::ScalarType::Float;
  Float32 float32{};
  at::CuBLASReductionOption fp16_reduction =
      at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
  at::CuBLASReductionOption bf16_reduction =
      at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
  bool fp16_accumulation = false;
  bool fp16_reduction_on_cpu = false;
  at::BlasBackend blas = at::BlasBackend::Default;
  at::LinalgBackend linalg = at::LinalgBackend::Default;
  bool nnpack = true;
  bool mkldnn = true;
  bool mkldnn_deterministic = false;
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

/// Note [Inherited precisions]
/// A program may set the precision of 32-bit floats for one kind of op of a backend, for all of a
/// backend, or for all: an op sees the nearest that is set. Who sets it for one kind of op, and
/// then what has been read there, has set it for good: what the program sets for all reaches that
/// op no more. So what differs is set where the program has set it: from the top down, and below
/// only where something else than that is seen still.

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
