#pragma once

#include <torch/csrc/autograd/graph_task.h>

namespace torch_lms {

/// Whether the calling thread runs a backward. Thread-safe.
inline bool in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

} // namespace torch_lms
