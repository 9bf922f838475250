#include <extension/access/NumericState.h>

#include <tuple>
#include <utility>

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

/// Whose precision `NumericState::float32` holds, in its order.
constexpr std::pair<at::Float32Backend, at::Float32Op> kFloat32[] = {
    {at::Float32Backend::CUDA, at::Float32Op::CONV},
    {at::Float32Backend::CUDA, at::Float32Op::RNN},
    {at::Float32Backend::CUDA, at::Float32Op::MATMUL},
    {at::Float32Backend::MKLDNN, at::Float32Op::CONV},
    {at::Float32Backend::MKLDNN, at::Float32Op::RNN},
    {at::Float32Backend::MKLDNN, at::Float32Op::MATMUL}};

auto tied(const NumericState& state) {
  return std::make_tuple(
      static_cast<int>(state.default_dtype),
      state.float32,
      state.mkldnn,
      state.cudnn,
      state.cudnn_deterministic,
      state.cudnn_benchmark,
      state.deterministic,
      state.deterministic_warns,
      state.threads,
      state.processor);
}

template <typename Value>
size_t hash_of(const Value& value) {
  return static_cast<size_t>(value);
}

size_t hash_of(const std::array<at::Float32Precision, 6>& precisions) {
  size_t hash = 0;
  for (const at::Float32Precision precision : precisions) {
    hash = c10::hash_combine(hash, static_cast<size_t>(precision));
  }
  return hash;
}

} // namespace

NumericState NumericState::now() {
  const at::Context& context = at::globalContext();
  NumericState state;
  state.default_dtype = c10::get_default_dtype_as_scalartype();
  for (size_t i = 0; i < state.float32.size(); ++i) {
    state.float32[i] = context.float32Precision(kFloat32[i].first, kFloat32[i].second);
  }
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
      [&](const auto&... value) { ((hash = c10::hash_combine(hash, hash_of(value))), ...); },
      tied(*this));
  return hash;
}

void NumericState::set() const {
  at::Context& context = at::globalContext();
  c10::set_default_dtype(c10::scalarTypeToTypeMeta(default_dtype));
  for (size_t i = 0; i < float32.size(); ++i) {
    const auto [backend, op] = kFloat32[i];
    if (context.float32Precision(backend, op) != float32[i]) {
      context.setFloat32Precision(backend, op, float32[i]);
    }
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
