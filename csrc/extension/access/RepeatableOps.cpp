#include <extension/access/RepeatableOps.h>

#include <algorithm>
#include <array>

#include <ATen/core/enum_tag.h>

namespace torch_lms {
namespace {

/// Ops whose results are not set by their inputs, though nothing in their schema says so: they
/// leave memory as they found it, update running statistics, or keep a state of their own.
/// `is_batch_norm` is an exception.
constexpr std::array<const char*, 7> kUnsettled =
    {"empty", "batch_norm", "rnn", "lstm", "gru", "resize", "fused_moving_avg"};

bool is_attention(const std::string& name) {
  return name.find("attention") != std::string::npos;
}

bool is_batch_norm(const std::string& name) {
  return name == "aten::native_batch_norm" || name == "aten::cudnn_batch_norm";
}

/// Whether the op writes to one tensor and returns it, and does nothing else with its arguments.
bool overwrites_one(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  int64_t aliased = 0;
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.alias_info() != nullptr) {
      const bool in_place = argument.alias_info()->isWrite() && !argument.is_out() &&
                            *argument.type() == *c10::TensorType::get();
      aliased += in_place ? 1 : 2;
    }
  }
  return aliased == 1 && schema.returns().size() == 1 &&
         schema.returns()[0].alias_info() != nullptr && !op.hasTag(at::Tag::inplace_view);
}

bool has_argument(const c10::FunctionSchema& schema, const char* name) {
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.name() == name) {
      return true;
    }
  }
  return false;
}

} // namespace

bool updates_statistics(const c10::FunctionSchema& schema, Values values) {
  if (!is_batch_norm(schema.name())) {
    return false;
  }
  const auto training = schema.argumentIndexWithName("training");
  return training.has_value() && values[static_cast<size_t>(*training)].toBool();
}

c10::IValue without_statistics(const std::string& argument, const c10::IValue& value) {
  if (argument == "running_mean" || argument == "running_var") {
    return c10::IValue();
  }
  // It may be another in each step.
  return argument == "momentum" || argument == "exponential_average_factor" ? c10::IValue(0.0)
                                                                            : value;
}

bool can_run_again(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  const std::string& name = schema.name();
  if (name.rfind("aten::", 0) != 0 || schema.returns().empty()) {
    return false;
  }
  const bool aliases = std::any_of(
      schema.arguments().begin(), schema.arguments().end(), [](const c10::Argument& argument) {
        return argument.alias_info() != nullptr;
      });
  if (aliases && !overwrites_one(op)) {
    return false;
  }
  if (is_batch_norm(name)) {
    return true;
  }
  for (const char* unsettled : kUnsettled) {
    if (name.find(unsettled) != std::string::npos) {
      return false;
    }
  }
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    return name == kNativeDropout || (is_attention(name) && has_argument(schema, kDropout));
  }
  return true;
}

} // namespace torch_lms
