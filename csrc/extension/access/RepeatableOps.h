#pragma once

#include <string>

#include <ATen/core/dispatch/Dispatcher.h>

#include <extension/access/Storages.h>

namespace torch_lms {

// Which ops can be run again, as far as their schemas say: see Note [Recipes]. Thread-safe; nothing
// blocks.

constexpr const char* kDropout = "dropout_p"; // an argument of attention's
constexpr const char* kNativeDropout = "aten::native_dropout"; // what it makes: an output, a mask

/// Whether ops of this kind can be run again, as far as that can be said without their inputs.
bool can_run_again(const c10::OperatorHandle& op);

/// Whether the op updates running statistics, which none of its results depends on then.
bool updates_statistics(const c10::FunctionSchema& schema, Values values);

/// What batch norm that trains is given for an argument when it is run again.
c10::IValue without_statistics(const std::string& argument, const c10::IValue& value);

} // namespace torch_lms
