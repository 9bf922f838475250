#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <shared_mutex>

#include <ATen/Context.h>
#include <c10/core/ScalarType.h>

namespace torch_lms {

/// The switches of PyTorch that change which numbers an op makes: those of the process, and of the
/// calling thread's processor.
///
/// Thread-safe. Blocks on nothing.
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
  /// The same, but for what is set for a while: none while a `WithNumericState` of another thread
  /// has switches that differ from the program's.
  static std::optional<NumericState> of_program();
  bool operator==(const NumericState& other) const;
  size_t hash() const;

  /// All but `float32`.
  void set() const;
  /// The same, of those that threads share.
  void set_shared() const;
};

/// Note [Inherited precisions]
/// A program may set the precision of 32-bit floats for one kind of op of a backend, for all of a
/// backend, or for all: an op sees the nearest that is set. PyTorch tells what is seen, and not
/// where it is set. To set what has been seen would set it for good: what the program sets for all
/// would reach that op no more. So it is found out where each is set before any is changed: what
/// is set itself stays the same when what it would inherit from is set to one value, and another.
/// From the top down only what is seen to differ is set, and afterwards set as it was: PyTorch has
/// a default for some that the program cannot set again, and that it has never set.

/// Note [Switches of the process]
/// Threads share most switches. Ops that are run again at once share them, too, as long as they
/// are as each of these ops wants them; one that wants others has them alone. So none sees those
/// of another, and what is put back afterwards is the program's. Ops of the program itself that
/// other threads run meanwhile do see them: whoever had these wait would have to wait for those
/// that run already, which may wait for what is being made again.
///
/// A forked child has the process's switches as they are at that moment, and no thread that would
/// put them back. So who changes them says so before, with all that it takes to put them back,
/// whatever has been set of it until then; the child does it.

/// The switches are as in `state` while it lives.
///
/// Waits until those of other threads let it have them; inside of another one on the same thread
/// for nobody; without Python's lock. See Note [Switches of the process].
class WithNumericState {
 public:
  explicit WithNumericState(const NumericState& state);
  ~WithNumericState();
  WithNumericState(const WithNumericState&) = delete;
  WithNumericState& operator=(const WithNumericState&) = delete;

  /// In a forked child: puts back what another thread had changed. Blocks on nothing.
  static void put_back_in_child();

 private:
  void set_float32(const NumericState::Float32& wanted);
  void note_float32(size_t level, at::Float32Precision before);
  void put_back_float32();

  const bool nested_;
  std::shared_lock<std::shared_mutex> shared_;
  std::unique_lock<std::shared_mutex> alone_;
  NumericState before_;
  bool differs_;
  NumericState::Float32 float32_before_{};
  std::atomic<uint32_t> float32_set_{0}; // a bit for each of these that counts
};

} // namespace torch_lms
