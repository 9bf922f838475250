#include <extension/access/NumericState.h>

#include <string>
#include <tuple>

#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/hash.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace torch_lms {
namespace {

uint32_t processor_now() {
#if defined(__x86_64__)
  return _mm_getcsr() & ~uint32_t{0x3F}; // without what the last instructions have raised
#else
  return 0;
#endif
}

void set_processor(uint32_t wanted) {
#if defined(__x86_64__)
  _mm_setcsr(wanted | (_mm_getcsr() & 0x3F));
#else
  static_cast<void>(wanted);
#endif
}

std::string name_of(at::Float32MatmulPrecision precision) {
  switch (precision) {
    case at::Float32MatmulPrecision::HIGHEST:
      return "highest";
    case at::Float32MatmulPrecision::HIGH:
      return "high";
    default:
      return "medium";
  }
}

auto tied(const NumericState& state) {
  return std::make_tuple(
      static_cast<int>(state.default_dtype),
      static_cast<int>(state.matmul_precision),
      state.mkldnn,
      state.cudnn,
      state.cudnn_deterministic,
      state.cudnn_benchmark,
      state.deterministic,
      state.deterministic_warns,
      state.threads,
      state.processor);
}

} // namespace

NumericState NumericState::now() {
  const at::Context& context = at::globalContext();
  NumericState state;
  state.default_dtype = c10::get_default_dtype_as_scalartype();
  state.matmul_precision = context.float32MatmulPrecision();
  state.mkldnn = context.userEnabledMkldnn();
  state.cudnn = context.userEnabledCuDNN();
  state.cudnn_deterministic = context.deterministicCuDNN();
  state.cudnn_benchmark = context.benchmarkCuDNN();
  state.deterministic = context.deterministicAlgorithms();
  state.deterministic_warns = context.deterministicAlgorithmsWarnOnly();
  state.threads = at::get_num_threads();
  state.processor = processor_now();
  return state;
}

bool NumericState::operator==(const NumericState& other) const {
  return tied(*this) == tied(other);
}

size_t NumericState::hash() const {
  size_t hash = 0;
  std::apply(
      [&](const auto&... value) {
        ((hash = c10::hash_combine(hash, static_cast<size_t>(value))), ...);
      },
      tied(*this));
  return hash;
}

void NumericState::set() const {
  at::Context& context = at::globalContext();
  c10::set_default_dtype(c10::scalarTypeToTypeMeta(default_dtype));
  if (context.float32MatmulPrecision() != matmul_precision) {
    context.setFloat32MatmulPrecision(name_of(matmul_precision));
  }
  context.setUserEnabledMkldnn(mkldnn);
  context.setUserEnabledCuDNN(cudnn);
  context.setDeterministicCuDNN(cudnn_deterministic);
  context.setBenchmarkCuDNN(cudnn_benchmark);
  context.setDeterministicAlgorithms(deterministic, deterministic_warns);
  if (at::get_num_threads() != threads) {
    at::set_num_threads(threads);
  }
  set_processor(processor);
}

WithNumericState::WithNumericState(const NumericState& state)
    : before_(NumericState::now()), differs_(!(before_ == state)) {
  if (differs_) {
    state.set();
  }
}

WithNumericState::~WithNumericState() {
  if (differs_) {
    before_.set();
  }
}

} // namespace torch_lms
