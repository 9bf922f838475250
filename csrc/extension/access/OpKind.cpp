#include <extension/access/OpKind.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string_view>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <extension/access/Storages.h>

namespace torch_lms {
namespace {

bool starts_with(const char* name, const char* prefix) {
  return std::strncmp(name, prefix, std::strlen(prefix)) == 0;
}

constexpr uint64_t kAll = ~uint64_t{0};

/// Whether an op has no kernel for the devices that are paged, but is written in terms of others.
bool is_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

/// What the schema says; but most ops that update running statistics say nothing.
uint64_t written_arguments(const c10::OperatorHandle& op) {
  uint64_t written = 0;
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if ((alias != nullptr && alias->isWrite()) ||
        starts_with(arguments[i].name().c_str(), "running_")) {
      written |= uint64_t{1} << std::min<size_t>(i, 63);
    }
  }
  return written;
}

/// See Note [Addresses that are only read through].
bool takes_addresses(const char* name) {
  return std::strcmp(name, "aten::_grouped_mm") == 0 ||
         starts_with(name, "aten::_scaled_grouped_mm");
}

/// Whether all tensors that it is given are aliased by what it returns, and written by nobody.
bool is_view(const c10::OperatorHandle& op) {
  bool any = false;
  for (const c10::Argument& argument : op.schema().arguments()) {
    if (argument.type()->isSubtypeOf(*c10::NumberType::get()) ||
        argument.type()->repr_str().find("Tensor") == std::string::npos) {
      continue;
    }
    if (argument.alias_info() == nullptr || argument.alias_info()->isWrite()) {
      return false;
    }
    any = true;
  }
  return any;
}

c10::DispatchKeySet casts_of(const c10::OperatorHandle& op) {
  c10::DispatchKeySet casts;
  for (const auto key : {c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA}) {
    casts = op.hasKernelForDispatchKey(key) ? casts.add(key) : casts;
  }
  return casts;
}

c10::DispatchKeySet keys_of(const c10::IValue& value) {
  if (value.isTensor()) {
    return value.unsafeToTensorImpl()->key_set();
  }
  c10::DispatchKeySet keys;
  if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (!element.isTensor() && !element.isNone()) {
        break; // a list of numbers
      }
      keys = keys | keys_of(element);
    }
  }
  return keys;
}

OpTraits traits_of_pytorchs(const char* name, const char* overload) {
  OpTraits traits;
  traits.kind = OpKind::kSealed;
  traits.written = kAll;
  if (std::strcmp(name, "aten::record_stream") == 0 ||
      std::strcmp(name, "aten::_lazy_clone") == 0) {
    traits.kind = OpKind::kInspecting;
    return traits;
  }
  const auto op = c10::Dispatcher::singleton().findOp({name, overload});
  if (!op.has_value()) {
    return traits;
  }
  traits.kind = is_composite(*op) ? OpKind::kComposite
                : is_view(*op)    ? OpKind::kView
                                  : OpKind::kSealed;
  traits.written = written_arguments(*op);
  traits.casts = casts_of(*op);
  traits.arguments = static_cast<uint32_t>(op->schema().arguments().size());
  traits.takes_addresses = takes_addresses(name);
  traits.makes_empty = starts_with(name, "aten::empty") || starts_with(name, "aten::new_empty");
  return traits;
}

OpTraits find_traits(const char* name, const char* overload) {
  if (starts_with(name, "aten::")) {
    return traits_of_pytorchs(name, overload);
  }
  OpTraits traits;
  if (starts_with(name, "autograd::engine::evaluate_function")) {
    traits.kind = OpKind::kNode;
    return traits;
  }
  // Ops have qualified names. Records of Python's autograd Functions and other regions do not;
  // the engine's are its own. Whole programs run inside of them (a checkpoint's forward).
  if (std::strchr(name, ':') == nullptr || starts_with(name, "autograd::")) {
    return traits;
  }
  const bool collective = starts_with(name, "c10d::") || starts_with(name, "_c10d");
  traits.kind = collective ? OpKind::kCollective : OpKind::kHolding;
  traits.written = kAll;
  return traits;
}

} // namespace

bool OpKinds::casts_now(const at::RecordFunction& record, c10::DispatchKeySet casts) {
  const c10::DispatchKeySet here = casts - c10::impl::tls_local_dispatch_key_set().excluded_;
  if (here.empty()) {
    return false;
  }
  const Values inputs = inputs_of(record);
  return std::any_of(inputs.begin(), inputs.end(), [here](const c10::IValue& value) {
    return keys_of(value).has_any(here);
  });
}

OpTraits OpKinds::look_up(const at::RecordFunction& record, const char* name) {
  Known& known = known_of(name);
  OpTraits traits = find_traits(name, record.overload_name());
  traits.name = std::hash<std::string_view>()(name);
  if (std::strlen(name) < known.name.size()) {
    known.address = name;
    std::strcpy(known.name.data(), name);
    known.traits = traits;
  }
  return traits;
}

} // namespace torch_lms
