#include <extension/access/NumericState.h>

#include <atomic>
#include <tuple>
#include <utility>

#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/hash.h>

#include <extension/base/Interpreter.h>

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

using at::Float32Backend;
using at::Float32Op;
using at::Float32Precision;

/// Whose precision `NumericState::float32` holds, in its order; and from which of them each
/// inherits.
struct Float32Level {
  Float32Backend backend;
  Float32Op op;
  size_t parent;
};
constexpr Float32Level kFloat32[] = {
    {Float32Backend::GENERIC, Float32Op::ALL, 0},
    {Float32Backend::CUDA, Float32Op::ALL, 0},
    {Float32Backend::MKLDNN, Float32Op::ALL, 0},
    {Float32Backend::CUDA, Float32Op::CONV, 1},
    {Float32Backend::CUDA, Float32Op::RNN, 1},
    {Float32Backend::CUDA, Float32Op::MATMUL, 1},
    {Float32Backend::MKLDNN, Float32Op::CONV, 2},
    {Float32Backend::MKLDNN, Float32Op::RNN, 2},
    {Float32Backend::MKLDNN, Float32Op::MATMUL, 2}};

Float32Precision seen(const Float32Level& level) {
  return at::globalContext().float32Precision(level.backend, level.op);
}

void set_at_level(const Float32Level& level, Float32Precision wanted) {
  at::globalContext().setFloat32Precision(level.backend, level.op, wanted);
}

/// What is set at a level itself, where `above` is set in what it inherits from.
Float32Precision found_at(const Float32Level& level, Float32Precision above) {
  const Float32Level& parent = kFloat32[level.parent];
  set_at_level(parent, Float32Precision::IEEE);
  const Float32Precision under_ieee = seen(level);
  set_at_level(parent, Float32Precision::TF32);
  const Float32Precision under_tf32 = seen(level);
  set_at_level(parent, above);
  return under_ieee == under_tf32 ? under_ieee : Float32Precision::NONE;
}

void set_reduction(
    at::CuBLASReductionOption option,
    void (at::Context::*set)(bool allow_reduced_precision, bool allow_splitk)) {
  using Option = at::CuBLASReductionOption;
  (at::globalContext().*set)(
      option == Option::AllowReducedPrecisionWithSplitK,
      option != Option::DisallowReducedPrecisionDisallowSplitK);
}

auto tied(const NumericState& state) {
  return std::make_tuple(
      static_cast<int>(state.default_dtype),
      state.float32,
      state.fp16_reduction,
      state.bf16_reduction,
      state.fp16_accumulation,
      state.fp16_reduction_on_cpu,
      state.blas,
      state.linalg,
      state.nnpack,
      state.mkldnn,
      state.mkldnn_deterministic,
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

size_t hash_of(const NumericState::Float32& precisions) {
  size_t hash = 0;
  for (const Float32Precision precision : precisions) {
    hash = c10::hash_combine(hash, static_cast<size_t>(precision));
  }
  return hash;
}

/// See Note [Switches of the process].
std::shared_mutex& switches() {
  static auto* const mutex = new std::shared_mutex(); // threads may outlive what is static
  return *mutex;
}
thread_local bool has_switches = false;
/// Who has changed them; null while they are the program's.
std::atomic<WithNumericState*> changes{nullptr};

template <typename Lock>
Lock wait_for_switches() {
  Lock lock(switches(), std::try_to_lock);
  if (!lock.owns_lock()) {
    const WithoutGil no_gil; // who has them may need it
    lock.lock();
  }
  return lock;
}

} // namespace

std::optional<NumericState> NumericState::of_program() {
  if (has_switches) {
    return now();
  }
  const std::shared_lock<std::shared_mutex> shared(switches(), std::try_to_lock);
  return shared.owns_lock() ? std::make_optional(now()) : std::nullopt;
}

NumericState NumericState::now() {
  at::Context& context = at::globalContext();
  NumericState state;
  state.default_dtype = c10::get_default_dtype_as_scalartype();
  for (size_t i = 0; i < state.float32.size(); ++i) {
    state.float32[i] = context.float32Precision(kFloat32[i].backend, kFloat32[i].op);
  }
  state.fp16_reduction = context.allowFP16ReductionCuBLAS();
  state.bf16_reduction = context.allowBF16ReductionCuBLAS();
  state.fp16_accumulation = context.allowFP16AccumulationCuBLAS();
  state.fp16_reduction_on_cpu = context.allowFP16ReductionCPU();
  state.blas = context.blasPreferredBackend();
  state.linalg = context.linalgPreferredBackend();
  state.nnpack = context.userEnabledNNPACK();
  state.mkldnn = context.userEnabledMkldnn();
  state.mkldnn_deterministic = context.deterministicMkldnn();
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
  set_shared();
  if (at::get_num_threads() != threads) {
    at::set_num_threads(threads);
  }
  set_processor(processor);
}

void NumericState::set_shared() const {
  at::Context& context = at::globalContext();
  c10::set_default_dtype(c10::scalarTypeToTypeMeta(default_dtype));
  set_reduction(fp16_reduction, &at::Context::setAllowFP16ReductionCuBLAS);
  set_reduction(bf16_reduction, &at::Context::setAllowBF16ReductionCuBLAS);
  // These say that a processor or a build has none, or that they are experimental.
  if (context.allowFP16AccumulationCuBLAS() != fp16_accumulation) {
    context.setAllowFP16AccumulationCuBLAS(fp16_accumulation);
  }
  if (context.allowFP16ReductionCPU() != fp16_reduction_on_cpu) {
    context.setAllowFP16ReductionCPU(fp16_reduction_on_cpu);
  }
  if (context.blasPreferredBackend() != blas) {
    context.setBlasPreferredBackend(blas);
  }
  if (context.linalgPreferredBackend() != linalg) {
    context.setLinalgPreferredBackend(linalg);
  }
  context.setUserEnabledNNPACK(nnpack);
  context.setUserEnabledMkldnn(mkldnn);
  context.setDeterministicMkldnn(mkldnn_deterministic);
  context.setUserEnabledCuDNN(cudnn);
  context.setDeterministicCuDNN(cudnn_deterministic);
  context.setBenchmarkCuDNN(cudnn_benchmark);
  context.setDeterministicAlgorithms(deterministic, deterministic_warns);
}

WithNumericState::WithNumericState(const NumericState& state) : nested_(has_switches) {
  if (!nested_) {
    shared_ = wait_for_switches<std::shared_lock<std::shared_mutex>>();
  }
  before_ = NumericState::now();
  if (!nested_ && !(before_ == state)) {
    shared_.unlock();
    alone_ = wait_for_switches<std::unique_lock<std::shared_mutex>>();
    before_ = NumericState::now();
  }
  differs_ = !(before_ == state);
  if (differs_) {
    WithNumericState* nobody = nullptr; // or the one that this is inside of: its are the program's
    changes.compare_exchange_strong(nobody, this);
    state.set();
  }
  if (before_.float32 != state.float32) {
    set_float32(state.float32);
  }
  has_switches = true;
}

/// Before the level is set.
void WithNumericState::note_float32(size_t level, Float32Precision before) {
  float32_before_[level] = before;
  float32_set_.fetch_or(uint32_t{1} << level); // the value is there first
}

/// Finds out what is set at each level itself; then from the top down sets only what is seen to
/// differ. See Note [Inherited precisions].
void WithNumericState::set_float32(const NumericState::Float32& wanted) {
  NumericState::Float32 before{};
  for (size_t i = 0; i < before.size(); ++i) {
    const Float32Level& level = kFloat32[i];
    if (level.parent == i) {
      before[i] = seen(level);
    } else {
      note_float32(level.parent, before[level.parent]);
      before[i] = found_at(level, before[level.parent]);
    }
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (seen(kFloat32[i]) != wanted[i]) {
      note_float32(i, before[i]);
      set_at_level(kFloat32[i], wanted[i]);
    }
  }
}

void WithNumericState::put_back_float32() {
  for (size_t i = 0; i < float32_before_.size(); ++i) {
    if ((float32_set_.load() >> i & 1) != 0) {
      set_at_level(kFloat32[i], float32_before_[i]);
    }
  }
}

WithNumericState::~WithNumericState() {
  put_back_float32();
  if (differs_) {
    before_.set();
    WithNumericState* self = this;
    changes.compare_exchange_strong(self, nullptr);
  }
  has_switches = nested_;
}

/// What is a thread's own the child's has kept. How many threads new ones work with goes by who
/// has set it last.
void WithNumericState::put_back_in_child() {
  if (has_switches) { // they are this thread's, which puts them back itself
    return;
  }
  WithNumericState* const changed = changes.exchange(nullptr);
  if (changed == nullptr) {
    return;
  }
  changed->put_back_float32();
  changed->before_.set_shared();
  at::set_num_threads(at::get_num_threads());
}

} // namespace torch_lms
