#include <extension/policy/CrowdedWindow.h>

#include <algorithm>
#include <numeric>
#include <set>
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

size_t pageout_cost(const Entity& entity, size_t copy_cost) {
  return (entity.keeps_copy() ? 1 : copy_cost) * entity.nbytes();
}

size_t pageout_cost(const std::vector<EntityPtr>& entities, size_t copy_cost) {
  return std::accumulate(
      entities.begin(), entities.end(), size_t{0}, [&](size_t sum, const EntityPtr& entity) {
        return sum + pageout_cost(*entity, copy_cost);
      });
}

/// What is needed soon costs twice as much.
size_t cost_of(const std::vector<Victim>& victims, size_t place, size_t copy_cost) {
  const size_t soon = place >= victims.size() / 2 ? 2 : 1;
  return soon * pageout_cost(*victims[place].entity, copy_cost);
}

struct Candidate {
  const std::vector<AllocatorBlock>* segment;
  FreeWindow window;
};

std::vector<Candidate> candidates_in(
    const std::vector<std::vector<AllocatorBlock>>& segments,
    const std::vector<Victim>& victims,
    const Places& movable,
    size_t nbytes,
    size_t copy_cost) {
  std::vector<Candidate> found;
  for (const auto& blocks : segments) {
    std::vector<WindowBlock> segment;
    for (const AllocatorBlock& block : blocks) {
      const auto at = movable.find(block.address);
      segment.push_back(
          {block.nbytes,
           block.free            ? 0
           : at == movable.end() ? WindowBlock::kImmovable
                                 : cost_of(victims, at->second, copy_cost)});
    }
    for (const FreeWindow& window : shortest_windows(segment, nbytes)) {
      found.push_back({&blocks, window});
    }
  }
  std::stable_sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
    return a.window.cost < b.window.cost;
  });
  return found;
}

/// Whether what lies in a window finds place in what is free elsewhere, largest first, each where
/// least is left over: as `LargePieces::move_aside` and the allocator will have it.
bool fits_elsewhere(const Candidate& candidate, std::multiset<size_t> holes) {
  std::vector<size_t> inside;
  for (size_t i = candidate.window.first; i < candidate.window.last; ++i) {
    const AllocatorBlock& block = (*candidate.segment)[i];
    if (block.free) {
      holes.erase(holes.find(block.nbytes));
    } else {
      inside.push_back(block.nbytes);
    }
  }
  std::sort(inside.rbegin(), inside.rend());
  for (const size_t nbytes : inside) {
    const auto hole = holes.lower_bound(nbytes);
    if (hole == holes.end()) {
      return false;
    }
    holes.insert(*hole - nbytes);
    holes.erase(hole);
  }
  return true;
}

std::vector<EntityPtr> entities_in(
    const Candidate& candidate,
    const std::vector<Victim>& victims,
    const Places& movable) {
  std::vector<EntityPtr> found;
  for (size_t i = candidate.window.first; i < candidate.window.last; ++i) {
    const AllocatorBlock& block = (*candidate.segment)[i];
    if (!block.free) {
      found.push_back(victims[movable.at(block.address)].entity);
    }
  }
  std::sort(found.begin(), found.end(), [](const EntityPtr& a, const EntityPtr& b) {
    return a->nbytes() > b->nbytes();
  });
  return found;
}

} // namespace

const std::vector<EntityPtr>& CrowdedWindow::to_page_out(size_t copy_cost) const {
  return pageout_cost(inside, copy_cost) <= pageout_cost(cheapest, copy_cost) ? inside : cheapest;
}

CrowdedWindow find_crowded_window(
    const std::vector<std::vector<AllocatorBlock>>& segments,
    const std::vector<Victim>& victims,
    size_t nbytes,
    size_t copy_cost) {
  constexpr size_t kMostToTry = 64; // each costs microseconds
  const Places movable = places_of_movable(victims);
  const std::vector<Candidate> candidates =
      candidates_in(segments, victims, movable, nbytes, copy_cost);
  CrowdedWindow found;
  if (candidates.empty()) {
    return found;
  }
  std::multiset<size_t> holes;
  for (const auto& blocks : segments) {
    for (const AllocatorBlock& block : blocks) {
      if (block.free) {
        holes.insert(block.nbytes);
      }
    }
  }
  const auto last =
      candidates.begin() + static_cast<std::ptrdiff_t>(std::min(candidates.size(), kMostToTry));
  const auto whole = std::find_if(candidates.begin(), last, [&](const Candidate& candidate) {
    return fits_elsewhere(candidate, holes);
  });
  const Candidate& best = whole != last ? *whole : candidates.front();
  const std::vector<AllocatorBlock>& blocks = *best.segment;
  const AllocatorBlock& end = blocks[best.window.last - 1];
  found.begin = reinterpret_cast<uintptr_t>(blocks[best.window.first].address);
  found.end = reinterpret_cast<uintptr_t>(end.address) + end.nbytes;
  found.inside = entities_in(best, victims, movable);
  found.cheapest = entities_in(candidates.front(), victims, movable);
  return found;
}

} // namespace torch_lms
