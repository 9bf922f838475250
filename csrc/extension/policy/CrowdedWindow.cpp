#include <extension/policy/CrowdedWindow.h>

#include <unordered_map>

#include <extension/policy/FreeWindow.h>

namespace torch_lms {
namespace {

using Places = std::unordered_map<const void*, size_t>; // by address, in `victims`

Places places_of_movable(const std::vector<Victim>& victims) {
  Places places;
  for (size_t i = 0; i < victims.size() - victims.size() / 8; ++i) {
    if (const void* address = victims[i].entity->device_address()) {
      places.emplace(address, i);
    }
  }
  return places;
}

/// What is needed soon costs twice as much, and so does what must be copied.
size_t cost_of(const std::vector<Victim>& victims, size_t place, size_t nbytes) {
  const size_t soon = place >= victims.size() / 2 ? 2 : 1;
  return soon * (victims[place].entity->keeps_copy() ? 1 : 2) * nbytes;
}

} // namespace

CrowdedWindow find_crowded_window(
    const std::vector<std::vector<AllocatorBlock>>& segments,
    const std::vector<Victim>& victims,
    size_t nbytes) {
  const Places movable = places_of_movable(victims);
  CrowdedWindow found;
  size_t least = SIZE_MAX;
  for (const auto& blocks : segments) {
    std::vector<WindowBlock> segment;
    for (const AllocatorBlock& block : blocks) {
      const auto at = movable.find(block.address);
      segment.push_back(
          {block.nbytes,
           block.free            ? 0
           : at == movable.end() ? WindowBlock::kImmovable
                                 : cost_of(victims, at->second, block.nbytes)});
    }
    const FreeWindow window = cheapest_window(segment, nbytes);
    if (window.cost >= least) {
      continue;
    }
    least = window.cost;
    const AllocatorBlock& last = blocks[window.last - 1];
    found.begin = reinterpret_cast<uintptr_t>(blocks[window.first].address);
    found.end = reinterpret_cast<uintptr_t>(last.address) + last.nbytes;
    found.inside.clear();
    for (size_t i = window.first; i < window.last; ++i) {
      if (!blocks[i].free) {
        found.inside.push_back(victims[movable.at(blocks[i].address)].entity);
      }
    }
  }
  return found;
}

} // namespace torch_lms
