#include <extension/policy/LargePieces.h>

#include <algorithm>
#include <numeric>

#include <ATen/record_function.h>
#include <entity/Error.h>

#include <extension/base/Interpreter.h>
#include <extension/base/ThreadContext.h>

namespace torch_lms {
namespace {

using Clock = Pageouts::Clock;
using Progress = Pageouts::Progress;

} // namespace

void LargePieces::make_contiguous(Device& device, size_t nbytes) {
  if (nbytes < state_.options.large_bytes || device.limit_bytes() == 0 ||
      this_thread().for_prefetch || device.capturing() ||
      wakefulness_.attention() == Attention::kAsleep || device.has_contiguous(nbytes)) {
    return;
  }
  if (!wakefulness_.may_vacate()) {
    return;
  }
  RECORD_USER_SCOPE("torch_lms::make_contiguous");
  const WithoutGil no_gil;
  const OpWaits waits(*state_.listener, device);
  const auto deadline = Clock::now() + state_.options.patience;
  uint64_t progress = state_.pager.out_queue().progress();
  for (int tries = 0; tries < state_.options.contiguous_tries && !device.has_contiguous(nbytes);
       ++tries) {
    const std::vector<Victim> victims = victims_on(device);
    CrowdedWindow window = find_crowded_window(device.blocks(), victims, nbytes, copy_cost());
    bool moved = move_aside(window);
    // What is on its way out anyway may be enough.
    while (!device.has_contiguous(nbytes) && Clock::now() < deadline &&
           pageouts_.wait(&progress, deadline) == Progress::kMoved) {
    }
    if (!device.has_contiguous(nbytes)) {
      moved |= trade_places(device, window, victims);
    }
    if (!device.has_contiguous(nbytes)) {
      moved |= let_go(device, window);
    }
    if (!device.has_contiguous(nbytes)) { // it keeps its block until its copy is over: one by one
      moved |= state_.pager.requests().cancel_last_prefetch();
    }
    if (!device.has_contiguous(nbytes) &&
        pageouts_.page_out(device, window.to_page_out(copy_cost())) == 0 && !moved) {
      return;
    }
  }
}

std::vector<Victim> LargePieces::victims_on(Device& device) {
  return state_.watch_of(device).resident_by_next_use(state_.cycles, wakefulness_.eligible_from());
}

size_t LargePieces::copy_cost() {
  const bool has_backward = state_.cycles.shape().length != 0;
  return has_backward ? state_.options.copy_cost : state_.options.copy_cost_without_backward;
}

bool LargePieces::move_out_of(const CrowdedWindow& window, const EntityPtr& entity) {
  return state_.pager.requests().relocate(
      entity, [&](const void* address) { return !window.holds(address); });
}

/// Moves what lies in a window to other places of the device: that costs next to nothing. What
/// cannot be moved stays in `window`. Returns whether anything has been.
bool LargePieces::move_aside(CrowdedWindow& window) {
  std::vector<EntityPtr>& inside = window.inside;
  const auto last = std::remove_if(inside.begin(), inside.end(), [&](const EntityPtr& entity) {
    return move_out_of(window, entity);
  });
  const bool moved = last != inside.end();
  inside.erase(last, inside.end());
  return moved;
}

/// What lies in a window, and could not be moved, would have to be copied out. It costs less to let
/// go, elsewhere, of what leaves without a copy, and to move it there. Returns whether anything has
/// been moved.
bool LargePieces::trade_places(Device& device, CrowdedWindow& window, std::vector<Victim> victims) {
  std::vector<EntityPtr> to_move;
  for (const EntityPtr& entity : window.inside) {
    if (!entity->keeps_copy() && window.holds(entity->device_address())) {
      to_move.push_back(entity);
    }
  }
  if (to_move.empty() || to_move.size() > state_.options.most_to_trade) {
    return false;
  }
  const auto stays = [&](const Victim& victim) {
    return !victim.entity->keeps_copy() || window.holds(victim.entity->device_address());
  };
  victims.resize(victims.size() - victims.size() / 8); // what is needed very next
  victims.erase(std::remove_if(victims.begin(), victims.end(), stays), victims.end());
  bool moved = false;
  for (const EntityPtr& entity : to_move) {
    auto segments = device.blocks();
    for (auto& blocks : segments) {
      for (AllocatorBlock& block : blocks) {
        block.free &= !window.holds(block.address);
      }
    }
    const auto place = find_crowded_window(segments, victims, entity->nbytes(), 1).cheapest;
    const auto add = [](size_t sum, const EntityPtr& one) { return sum + one->nbytes(); };
    if (std::accumulate(place.begin(), place.end(), size_t{0}, add) >=
            copy_cost() * entity->nbytes() ||
        pageouts_.page_out(device, place) == 0 || !move_out_of(window, entity)) {
      break;
    }
    moved = true;
    window.inside.erase(std::find(window.inside.begin(), window.inside.end(), entity));
  }
  return moved;
}

/// Lets a window go whose storages all leave without a copy: that waits for nothing, and costs less
/// than to copy again what is on its way in. Returns whether anything has left.
bool LargePieces::let_go(Device& device, const CrowdedWindow& window) {
  const std::vector<EntityPtr>& leaving = window.to_page_out(copy_cost());
  const auto keeps_copy = [](const EntityPtr& entity) { return entity->keeps_copy(); };
  return std::all_of(leaving.begin(), leaving.end(), keeps_copy) &&
         pageouts_.page_out(device, leaving) != 0;
}

void LargePieces::hold_placeholders(Device& device) {
  while (const size_t nbytes = state_.placeholders.missing_bytes()) {
    if (device.capturing() || device.use().allocated_bytes + nbytes > device.limit_bytes() ||
        !hold_placeholder(device, nbytes)) {
      return;
    }
  }
}

bool LargePieces::hold_placeholder(Device& device, size_t nbytes) {
  const WithoutGil no_gil;
  if (!device.has_contiguous(nbytes) && wakefulness_.may_vacate()) {
    CrowdedWindow window =
        find_crowded_window(device.blocks(), victims_on(device), nbytes, copy_cost());
    move_aside(window);
  }
  try {
    state_.placeholders.hold(device.allocate_placeholder(nbytes), nbytes);
  } catch (const NoRoom&) {
    return false;
  } catch (const c10::OutOfMemoryError&) {
    return false;
  }
  if (device.limit_bytes() == 0) { // since it was looked at
    state_.placeholders.release();
  }
  return true;
}

} // namespace torch_lms
