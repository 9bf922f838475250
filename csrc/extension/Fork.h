#pragma once

namespace torch_lms {

/// Whether this process was forked from one that used paging. Workers and locks
/// stayed in the parent: the child keeps paged-out storages where they are (they
/// are readable and writable in place, and its own) and moves nothing.
bool in_forked_child() noexcept;

/// Watches for forks from now on. Thread-safe; no effect when called again.
void watch_forks();

} // namespace torch_lms
