#include <extension/policy/FreeWindow.h>

namespace torch_lms {

std::vector<FreeWindow> shortest_windows(const std::vector<WindowBlock>& segment, size_t nbytes) {
  std::vector<FreeWindow> windows;
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
    if (span >= nbytes) {
      windows.push_back({first, last + 1, cost});
    }
  }
  return windows;
}

} // namespace torch_lms
