#include <extension/access/ProgramThread.h>

#include <torch/csrc/autograd/function.h>

namespace torch_lms {

void ProgramThread::note_backward() {
  const auto node = torch::autograd::get_current_node();
  if (node != nullptr) {
    other_.store(node->thread_id(), std::memory_order_relaxed);
  }
}

} // namespace torch_lms
