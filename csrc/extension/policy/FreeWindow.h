#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_lms {

/// A block of a segment, in the order of addresses.
struct WindowBlock {
  static constexpr size_t kImmovable = SIZE_MAX;

  size_t nbytes;
  size_t cost; ///< Of emptying it; 0 if it is free, `kImmovable` if that cannot be.
};

/// Neighbouring blocks [first, last) of one segment.
struct FreeWindow {
  size_t first = 0;
  size_t last = 0;
  size_t cost = 0; ///< Of all blocks together.
};

/// The shortest windows of at least `nbytes`, one for each last block; the one that costs least to
/// empty is among them. Linear in the number of blocks.
std::vector<FreeWindow> shortest_windows(const std::vector<WindowBlock>& segment, size_t nbytes);

} // namespace torch_lms
