#pragma once

#include <cstddef>
#include <string>

#include <extension/policy/PolicyState.h>
#include <extension/policy/Wakefulness.h>

namespace torch_lms {

/// What holds a device's memory, in bytes.
struct MemoryReport {
  size_t limit_bytes = 0;
  size_t allocated_bytes = 0;
  size_t reserved_bytes = 0;
  size_t movable_bytes = 0; ///< Resident storages that could go out.
  size_t in_use_bytes = 0; ///< Of running ops, and what they were given.
  size_t fixed_bytes = 0; ///< Pinned by the program, a captured graph or a collective.
  size_t leaving_bytes = 0; ///< On their way out.
  size_t unseen_bytes =
      0; ///< Of storages that no op has been seen to use: see Note [Learn, sleep, arm].
  size_t held_bytes = 0; ///< Lent to whoever needs room: see Note [Placeholders].
  size_t other_bytes = 0; ///< Small storages, private pools, what compiled code allocates inside.
};

/// Looks at all entities. Thread-safe, with and without the GIL; blocks on nothing but mutexes.
MemoryReport report_memory(Device& device, PolicyState& state, const Wakefulness& wakefulness);

/// Why an allocation of the op that the calling thread runs is refused, and what would do.
/// Thread-safe; blocks on nothing.
std::string text_of_refusal(Device& device, size_t nbytes, const MemoryReport& held);

} // namespace torch_lms
