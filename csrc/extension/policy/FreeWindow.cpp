#include <extension/policy/FreeWindow.h>

namespace torch_lms {

FreeWindow cheapest_window(const std::vector<WindowBlock>& segment, size_t nbytes) {
  FreeWindow best;
  size_t first = 0;
  size_t span = 0;
  size_t cost = 0;
  for (size_t last = 0; last < segment.size(); ++last) {
    if (segment[last].cost == WindowBlock::kImmovable) {
      first = last + 1;
      span = cost = 0;
      continue;
    }
    span += segment[last].nbytes;
    cost += segment[last].cost;
    while (span - segment[first].nbytes >= nbytes && first < last) {
      span -= segment[first].nbytes;
      cost -= segment[first].cost;
      ++first;
    }
    if (span >= nbytes && cost < best.cost) {
      best.first = first;
      best.last = last + 1;
      best.cost = cost;
    }
  }
  return best;
}

} // namespace torch_lms
