#pragma once

#include <algorithm>
#include <exception>
#include <vector>

#include <extension/transfer/Entity.h>

namespace torch_lms {

/// Note [Addresses that are only read through]
/// A storage that came from the host and has not been written since leaves without a copy; whoever
/// asks for its address to write to may have written. Some kernels ask for such an address of what
/// they only read: those of PyTorch's grouped matrix products, which get all weights of a mixture
/// of experts. What their schema says holds for these (`OpTraits::takes_addresses`), and for ops
/// that make something again, which write to what they make alone. Before PyTorch 2.13 nobody tells
/// of such access, and the block is not watched any more afterwards: so it is looked at before the
/// op, and watched again after it. What another thread writes meanwhile through an address of its
/// own is seen from 2.13 on only; ops of other threads always are.

/// Inputs of what runs that have a copy on the host, as good as the bytes, and are to keep it.
///
/// Not thread-safe: a thread's own. The entities are pinned meanwhile.
class KeptWatch {
 public:
  KeptWatch() = default;
  ~KeptWatch() {
    end();
  }
  KeptWatch(const KeptWatch&) = delete;
  KeptWatch& operator=(const KeptWatch&) = delete;

  void add(Entity& entity) {
    if (entity.keeps_copy() && entity.keeps_equal_copy()) {
      entities_.push_back(&entity);
    }
  }
  bool holds(const Entity& entity) const noexcept {
    return std::find(entities_.begin(), entities_.end(), &entity) != entities_.end();
  }
  void end() noexcept {
    for (Entity* entity : entities_) {
      try {
        if (entity->keeps_copy()) { // else somebody has written to it in a way that is seen
          entity->watch_writes();
        }
      } catch (const std::exception&) { // for want of a few bytes
        entity->release_copy();
      }
    }
    entities_.clear();
  }

 private:
  std::vector<Entity*> entities_;
};

} // namespace torch_lms
