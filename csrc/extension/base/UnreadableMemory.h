#pragma once

namespace torch_lms {

/// An address that nobody can read or write, nor anything behind it for as long as the largest
/// storage: what a dropped storage points at, so that an access that nothing sees faults and never
/// reads other bytes. Takes address space alone. Throws Error where there is none.
///
/// Thread-safe. Blocks on nothing but the first call.
void* unreadable_memory();

} // namespace torch_lms
