#pragma once

namespace torch_lms {

/// Note [Ops that began unseen]
/// While nothing is out, ops are not observed. What another thread began then may use a storage
/// that is to be paged out now, and nothing tells of it. So who makes ops observed by hand, beside
/// other threads of Python's, waits for a moment in which no other thread of the process runs, at
/// most a second. (One after the other would not do: an op sleeps while others work for it.)
/// Python's lock is held meanwhile: a thread falls asleep when its op is over, instead of going on
/// to the next without a pause. Who asks for the same at that time waits as well. Ops stay observed
/// from then on, so that it is waited for once: until all is brought back, or for as long as to
/// observe them costs less than to wait again (`OpCallbacks::end_requests`).
/// What this does not cover is in README.md, Limits.

/// Waits until what other threads have begun is over, as far as can be told. Thread-safe; with the
/// GIL, and with no lock held that another thread may want.
void wait_for_unseen_ops();

} // namespace torch_lms
