#pragma once

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/TensorBase.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

namespace torch_lms {

using Values = c10::ArrayRef<const c10::IValue>;

/// Note [Stacks of values]
/// An op that is called with a stack of values (functorch calls ops so) is recorded with all of the
/// stack, also with what belongs to its callers. Its own values lie on top.
inline Values top_of(Values stack, size_t count) {
  return count == 0 || count >= stack.size() ? stack : stack.slice(stack.size() - count);
}

inline Values inputs_of(const at::RecordFunction& record) {
  return top_of(record.inputs(), record.num_inputs());
}
/// The same of an op that is known to have so many arguments, which need not be asked for then.
inline Values inputs_of(const at::RecordFunction& record, size_t arguments) {
  const Values stack = record.inputs();
  return stack.size() == arguments ? stack : top_of(stack, record.num_inputs());
}

inline Values outputs_of(const at::RecordFunction& record) {
  const std::vector<c10::IValue>& outputs = record.outputs();
  const Values stack(outputs.data(), outputs.size());
  return stack.size() <= 1 ? stack : top_of(stack, record.num_outputs());
}

/// The storage of a tensor that has it for its own: of most. Null for everything else, which
/// `visit_storages` looks into.
inline c10::StorageImpl* only_storage_of(const c10::IValue& value) {
  if (!value.isTensor()) {
    return nullptr;
  }
  const at::TensorImpl* tensor = value.unsafeToTensorImpl();
  return tensor->has_storage() && !tensor->key_set().has(c10::DispatchKey::Python)
             ? tensor->unsafe_storage().unsafeGetStorageImpl()
             : nullptr;
}

/// Of a tensor without a storage of its own: see `visit_storages`.
template <typename Visit>
bool visit_parts(const at::TensorImpl* tensor, const Visit& visit);

template <typename Visit>
inline bool visit_storages(const at::TensorImpl* tensor, const Visit& visit) {
  if (tensor->key_set().has(c10::DispatchKey::Python)) {
    return false; // a wrapper; that it has a storage says nothing
  }
  if (tensor->has_storage()) {
    visit(*tensor->unsafe_storage().unsafeGetStorageImpl());
    return true;
  }
  return visit_parts(tensor, visit);
}

template <typename Visit>
bool visit_parts(const at::TensorImpl* tensor, const Visit& visit) {
  const auto visit_part = [&visit](const at::TensorBase& part) {
    return !part.defined() || visit_storages(part.unsafeGetTensorImpl(), visit);
  };
  switch (tensor->layout()) {
    case at::kSparse: {
      const auto* sparse = static_cast<const at::SparseTensorImpl*>(tensor);
      const bool indices = visit_part(sparse->indices());
      return visit_part(sparse->values()) && indices;
    }
    case at::kSparseCsr:
    case at::kSparseCsc:
    case at::kSparseBsr:
    case at::kSparseBsc: {
      const auto* sparse = static_cast<const at::SparseCsrTensorImpl*>(tensor);
      const bool compressed = visit_part(sparse->compressed_indices());
      const bool plain = visit_part(sparse->plain_indices());
      return visit_part(sparse->values()) && compressed && plain;
    }
    case at::kMkldnn:
      return true; // no storage, and the op does not come again
    default:
      return false;
  }
}

/// Of a list or a tuple: see `visit_storages`.
template <typename Visit>
bool visit_elements(const c10::IValue& value, const Visit& visit);

/// Calls `visit` with every storage behind a value: of tensors, in lists and tuples, and of the
/// parts of sparse ones. Returns false if there are tensors whose storages cannot be seen:
/// wrappers (functorch's, Python's subclasses with `__torch_dispatch__`, nested tensors), whose op
/// comes again, unwrapped.
template <typename Visit>
inline bool visit_storages(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    const at::TensorImpl* tensor = value.unsafeToTensorImpl();
    return visit_storages(tensor, visit) || tensor == c10::UndefinedTensorImpl::singleton();
  }
  return !(value.isList() || value.isTuple()) || visit_elements(value, visit);
}

template <typename Visit>
bool visit_elements(const c10::IValue& value, const Visit& visit) {
  bool all = true;
  if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (!element.isTensor() && !element.isList() && !element.isTuple() && !element.isNone()) {
        return all; // a list of numbers
      }
      all = visit_storages(element, visit) && all;
    }
  } else if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      all = visit_storages(element, visit) && all;
    }
  }
  return all;
}

} // namespace torch_lms
