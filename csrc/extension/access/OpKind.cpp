#include <extension/access/OpKind.h>

#include <cstring>

#include <ATen/core/dispatch/Dispatcher.h>

namespace torch_lms {
namespace {

bool starts_with(const char* name, const char* prefix) {
  return std::strncmp(name, prefix, std::strlen(prefix)) == 0;
}

/// Whether an op has no kernel for the devices that are paged, but is written in terms of others.
bool is_composite(const char* name, const char* overload) {
  const auto op = c10::Dispatcher::singleton().findOp({name, overload});
  return op.has_value() &&
      op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
      !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
      !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

OpKind find_kind(const char* name, const char* overload) {
  if (starts_with(name, "aten::")) {
    if (std::strcmp(name, "aten::record_stream") == 0 ||
        std::strcmp(name, "aten::_lazy_clone") == 0) {
      return OpKind::kInspecting;
    }
    return is_composite(name, overload) ? OpKind::kComposite : OpKind::kSealed;
  }
  if (starts_with(name, "autograd::engine::evaluate_function")) {
    return OpKind::kNode;
  }
  // Ops have qualified names. Records of Python's autograd Functions and other regions do not;
  // the engine's are its own. Whole programs run inside of them (a checkpoint's forward).
  if (std::strchr(name, ':') == nullptr || starts_with(name, "autograd::")) {
    return OpKind::kTransparent;
  }
  return starts_with(name, "c10d::") || starts_with(name, "_c10d") ? OpKind::kCollective
                                                                   : OpKind::kHolding;
}

} // namespace

OpKind OpKinds::of(const at::RecordFunction& record) {
  const char* name = record.name();
  Known& known = known_[(reinterpret_cast<uintptr_t>(name) >> 4) % known_.size()];
  if (known.address == name && std::strcmp(known.name.data(), name) == 0) {
    return known.kind;
  }
  const OpKind kind = find_kind(name, record.overload_name());
  if (std::strlen(name) < known.name.size()) {
    known.address = name;
    std::strcpy(known.name.data(), name);
    known.kind = kind;
  }
  return kind;
}

} // namespace torch_lms
