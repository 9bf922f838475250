#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace torch_lms {

/// The middle one of some values, the upper of two; 0 of none.
///
/// Thread-safe. Blocks on nothing.
inline double median_of(std::vector<double> values) {
  if (values.empty()) {
    return 0;
  }
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

} // namespace torch_lms
