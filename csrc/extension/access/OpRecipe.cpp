#include <extension/access/OpRecipe.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include <ATen/core/enum_tag.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/hash.h>

#include <extension/access/BelowAutograd.h>
#include <extension/access/RepeatableOps.h>
#include <extension/base/ThreadContext.h>

namespace torch_lms {
namespace {

bool is_plain(const at::TensorImpl& tensor) {
  const auto functionality =
      tensor.key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView -
      c10::autocast_dispatch_keyset -
      c10::DispatchKeySet(
          {c10::DispatchKey::Dense, c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  return tensor.has_storage() && !tensor.has_symbolic_sizes_strides() &&
         (functionality.raw_repr() & ~c10::full_backend_mask) == 0 &&
         !tensor.unsafe_storage().unsafeGetStorageImpl()->sym_nbytes().is_heap_allocated();
}

/// Whether a value is one that means the same the next time.
bool is_constant(const c10::IValue& value) {
  return value.isNone() || value.isScalar() || value.isBool() || value.isString() ||
         value.isDevice() || value.isIntList() || value.isDoubleList() || value.isBoolList();
}

size_t bits_of(double value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

/// 1 and 1.0 are not the same, nor are 0.0 and -0.0.
size_t hash_of_constant(const c10::IValue& value) {
  if (value.isDouble()) {
    return c10::hash_combine(1, bits_of(value.toDouble()));
  }
  if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    return c10::hash_combine(bits_of(number.real()), bits_of(number.imag()));
  }
  if (value.isBool()) {
    return value.toBool() ? 2 : 3;
  }
  if (value.isInt()) {
    return c10::hash_combine(4, static_cast<size_t>(value.toInt()));
  }
  if (value.isList()) {
    size_t hash = 5;
    for (const c10::IValue& element : value.toListRef()) {
      hash = c10::hash_combine(hash, hash_of_constant(element));
    }
    return hash;
  }
  return c10::IValue::hash(value); // none, a string, a device
}

void append_tensors(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      tensors.push_back(tensor);
    }
  } else if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      append_tensors(element, tensors);
    }
  }
}

/// The kernels multiply by the mask and then by this: on CUDA as an accumulation type has it.
double scale_of_dropout(double p, const at::Tensor& made) {
  const bool exact = made.is_cpu() || made.scalar_type() == at::kDouble;
  return exact ? 1.0 / (1.0 - p) : static_cast<double>(1.0f / static_cast<float>(1.0 - p));
}

uint64_t next_id() {
  static std::atomic<uint64_t> next{0};
  return next.fetch_add(1, std::memory_order_relaxed);
}

} // namespace

OpRecipe::OpRecipe(const c10::OperatorHandle& op) : id_(next_id()), op_(op) {}

OpRecipe::OpRecipe(const OpRecipe& loose, std::vector<c10::Storage> inputs)
    : id_(loose.id_),
      op_(loose.op_),
      arguments_(loose.arguments_),
      storages_(std::move(inputs)),
      metas_(loose.metas_),
      defined_(loose.defined_),
      stream_(loose.stream_),
      state_(loose.state_),
      drawn_(loose.drawn_) {}

void OpRecipe::loosen() {
  TORCH_INTERNAL_ASSERT(
      earlier_ == nullptr && overwrites_ == nullptr, "the earlier one is not loose");
  for (c10::Storage& storage : storages_) {
    known_storages_.push_back(storage.getWeakStorageImpl());
    storage = c10::Storage();
  }
  loose_ = true;
}

std::shared_ptr<const OpRecipe> OpRecipe::held(const std::shared_ptr<const OpRecipe>& recipe) {
  if (!recipe->loose_) {
    return recipe;
  }
  std::vector<c10::Storage> inputs;
  for (size_t i = 0; i < recipe->known_storages_.size(); ++i) {
    inputs.emplace_back(recipe->known_storages_[i].lock());
    if (recipe->defined_[i] && !inputs.back()) {
      return nullptr;
    }
  }
  return std::shared_ptr<const OpRecipe>(new OpRecipe(*recipe, std::move(inputs)));
}

std::shared_ptr<OpRecipe> OpRecipe::capture(const at::RecordFunction& record) {
  const auto name = record.operator_name();
  const auto op = name.has_value() ? c10::Dispatcher::singleton().findOp(*name) : c10::nullopt;
  if (!op.has_value() || c10::impl::dispatch_mode_enabled() || !can_run_again(*op) ||
      op->schema().arguments().size() != inputs_of(record).size()) {
    return nullptr;
  }
  const std::optional<NumericState> state = NumericState::of_program();
  if (!state.has_value()) {
    return nullptr; // nobody knows which of them the op sees
  }
  std::shared_ptr<OpRecipe> recipe(new OpRecipe(*op));
  recipe->state_ = *state;
  const auto& arguments = op->schema().arguments();
  recipe->drawn_ = op->schema().name() == kNativeDropout;
  const bool seeded = op->hasTag(at::Tag::nondeterministic_seeded);
  const bool updates = updates_statistics(op->schema(), inputs_of(record));
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& given = inputs_of(record)[i];
    const c10::IValue value = updates ? without_statistics(arguments[i].name(), given) : given;
    const bool taken = arguments[i].alias_info() != nullptr
                           ? recipe->take_overwritten(value.toTensor())
                           : recipe->take(value);
    if (!taken || (seeded && arguments[i].name() == kDropout &&
                   !(value.isDouble() && value.toDouble() == 0))) {
      return nullptr;
    }
  }
  for (const c10::Storage& storage : recipe->storages_) {
    if (storage && storage.unsafeGetStorageImpl() == recipe->overwrites_) {
      return nullptr; // it reads elsewhere what it writes
    }
  }
  recipe->take_stream();
  return recipe;
}

void OpRecipe::take_stream() {
  const auto on_cuda = [](const Meta& meta) { return meta.device.is_cuda(); };
  const auto first = std::find_if(metas_.begin(), metas_.end(), on_cuda);
  if (first != metas_.end()) {
    stream_ = c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(first->device);
  }
}

bool OpRecipe::follow(const std::shared_ptr<const OpRecipe>& earlier, size_t output) {
  if (earlier->steps_ >= kMostSteps ||
      (earlier->stream_.has_value() && earlier->stream_ != stream_)) {
    return false;
  }
  earlier_ = earlier;
  earlier_output_ = output;
  steps_ = earlier->steps_ + 1;
  storages_.insert(storages_.end(), earlier->storages_.begin(), earlier->storages_.end());
  return true;
}

/// `native_dropout_backward(input, mask, scale)` is what `native_dropout` makes of its input.
bool OpRecipe::finish(const std::vector<at::Tensor>& made) {
  const auto is_other = [](const at::Tensor& one) {
    return one.defined() && !is_plain(*one.unsafeGetTensorImpl());
  };
  if (std::any_of(made.begin(), made.end(), is_other)) {
    return false; // a quantized one, say: its bytes alone are not it
  }
  if (overwrites_ != nullptr) {
    return made.size() == 1 && made[0].defined() && made[0].has_storage() &&
           made[0].unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == overwrites_;
  }
  if (!drawn_) {
    return true;
  }
  if (arguments_.size() != 3 || made.size() != 2 || !made[0].defined() || !made[1].defined()) {
    return false;
  }
  const double p = arguments_[1].toDouble();
  const bool trains = arguments_[2].isNone() || arguments_[2].toBool();
  const auto op = c10::Dispatcher::singleton().findOp({"aten::native_dropout_backward", ""});
  if (!trains || !(p > 0 && p < 1) || !op.has_value() || !take_tensor(made[1])) {
    return false;
  }
  op_ = *op;
  arguments_ = {at::Tensor(), at::Tensor(), scale_of_dropout(p, made[0])};
  return true;
}

bool OpRecipe::take_tensor(const at::Tensor& tensor) {
  defined_.push_back(tensor.defined());
  storages_.emplace_back();
  metas_.emplace_back();
  if (!tensor.defined()) {
    return true;
  }
  const at::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (!is_plain(impl)) {
    return false;
  }
  storages_.back() = impl.unsafe_storage();
  Meta& meta = metas_.back();
  meta.keys = impl.key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  meta.device = impl.device();
  meta.dtype = impl.dtype();
  meta.sizes = {impl.sizes().begin(), impl.sizes().end()};
  meta.strides = {impl.strides().begin(), impl.strides().end()};
  meta.offset = impl.storage_offset();
  meta.wrapped_number = impl.is_wrapped_number();
  return true;
}

/// What the op writes to is kept by nothing of the recipe's: it may be dropped.
bool OpRecipe::take_overwritten(const at::Tensor& tensor) {
  overwritten_ = storages_.size();
  arguments_.emplace_back(at::Tensor());
  if (!tensor.defined() || !take_tensor(tensor)) {
    return false;
  }
  overwrites_ = storages_.back().unsafeGetStorageImpl();
  storages_.back() = c10::Storage();
  return true;
}

/// False if it cannot be kept.
bool OpRecipe::take(const c10::IValue& value) {
  if (value.isTensor()) {
    arguments_.emplace_back(at::Tensor());
    return take_tensor(value.toTensor());
  }
  if (value.isTensorList() || value.isOptionalTensorList()) {
    arguments_.push_back(value);
    // The list itself would keep the tensors.
    c10::List<at::Tensor> none;
    c10::List<c10::optional<at::Tensor>> none_or;
    const auto elements = value.toListRef();
    bool all = true;
    for (const c10::IValue& element : elements) {
      if (value.isTensorList()) {
        none.push_back(at::Tensor());
      } else {
        none_or.push_back(element.isNone() ? c10::nullopt : c10::make_optional(at::Tensor()));
      }
      all = all && (element.isNone() || take_tensor(element.toTensor()));
    }
    arguments_.back() = value.isTensorList() ? c10::IValue(none) : c10::IValue(none_or);
    return all;
  }
  arguments_.push_back(value.isList() ? value.deepcopy() : value); // the program may change a list
  return is_constant(value);
}

at::Tensor OpRecipe::overwritten_bytes() const {
  const Meta& meta = metas_[overwritten_];
  auto storage = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
      const_cast<c10::StorageImpl*>(overwrites_));
  const auto nbytes = static_cast<int64_t>(storage->nbytes());
  at::Tensor bytes = at::detail::make_tensor<at::TensorImpl>(
      c10::Storage(std::move(storage)),
      meta.keys - c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}),
      caffe2::TypeMeta::Make<uint8_t>());
  bytes.unsafeGetTensorImpl()->set_sizes_contiguous(nbytes);
  return bytes;
}

at::Tensor OpRecipe::tensor(size_t index, const c10::Storage& overwritten) const {
  if (!defined_[index]) {
    return at::Tensor();
  }
  const Meta& meta = metas_[index];
  const bool is_overwritten = overwrites_ != nullptr && index == overwritten_;
  at::Tensor tensor = at::detail::make_tensor<at::TensorImpl>(
      c10::Storage(is_overwritten ? overwritten : storages_[index]), meta.keys, meta.dtype);
  at::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  impl.set_sizes_and_strides(meta.sizes, meta.strides, meta.offset);
  if (meta.wrapped_number) {
    impl.set_wrapped_number(true);
  }
  return tensor;
}

c10::IValue OpRecipe::value(const c10::IValue& taken, const c10::Storage& overwritten, size_t* next)
    const {
  if (taken.isTensor()) {
    return tensor((*next)++, overwritten);
  }
  if (taken.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (size_t i = taken.toListRef().size(); i > 0; --i) {
      tensors.push_back(tensor((*next)++, overwritten));
    }
    return tensors;
  }
  if (taken.isOptionalTensorList()) {
    c10::List<c10::optional<at::Tensor>> tensors;
    for (const c10::IValue& element : taken.toListRef()) {
      tensors.push_back(
          element.isNone() ? c10::nullopt : c10::make_optional(tensor((*next)++, overwritten)));
    }
    return tensors;
  }
  return taken;
}

std::vector<at::Tensor> OpRecipe::run() const {
  if (earlier_ == nullptr) {
    return run_op(c10::Storage());
  }
  const std::vector<at::Tensor> made = earlier_->run();
  TORCH_CHECK(
      earlier_output_ < made.size() && made[earlier_output_].defined(),
      "the earlier op made something else");
  return run_op(made[earlier_output_].storage());
}

std::vector<at::Tensor> OpRecipe::run_op(const c10::Storage& overwritten) const {
  const BelowAutograd ours;
  const Replaying scope;
  const WithNumericState as_then(state_);
  const c10::OptionalStreamGuard on_stream(stream_);
  TORCH_INTERNAL_ASSERT(!drawn_ || storages_.size() == 2, "it would draw other numbers");
  std::vector<c10::IValue> stack;
  size_t next = 0;
  for (const c10::IValue& taken : arguments_) {
    stack.push_back(value(taken, overwritten, &next));
  }
  op_.callBoxed(&stack);
  return tensors_in(Values(stack.data(), stack.size()));
}

uint64_t OpRecipe::kind() const {
  size_t kind =
      c10::hash_combine(std::hash<c10::OperatorName>()(op_.operator_name()), state_.hash());
  const auto add = [&kind](size_t value) { kind = c10::hash_combine(kind, value); };
  add(drawn_ ? 1 : 0); // the op that makes it again is not the one that made it
  for (const c10::IValue& argument : arguments_) {
    if (!argument.isTensor() && !argument.isTensorList() && !argument.isOptionalTensorList()) {
      add(hash_of_constant(argument));
    }
  }
  for (const Meta& meta : metas_) {
    add(std::hash<caffe2::TypeIdentifier>()(meta.dtype.id()));
    add(meta.keys.raw_repr());
    for (const auto* numbers : {&meta.sizes, &meta.strides}) {
      add(numbers->size());
      for (const int64_t number : *numbers) {
        add(static_cast<size_t>(number));
      }
    }
  }
  return kind;
}

std::vector<at::Tensor> tensors_in(Values values) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : values) {
    append_tensors(value, tensors);
  }
  return tensors;
}

} // namespace torch_lms
