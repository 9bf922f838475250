#pragma once

#include <cstddef>
#include <cstdint>

#include <extension/EntityTable.h>

namespace torch_lms {

/// Layer 2: one global RecordFunction callback pages an op's inputs in before the
/// op. It changes no dispatch keys and sees every thread.
///
/// The callback is installed while something is paged out or on its way, and all
/// the time in automatic mode; otherwise ops cost nothing. Ops that were running
/// when it was installed are not observed.

/// Installs the callback. False if it was installed already. Thread-safe.
bool observe_ops();

/// Removes the callback if nothing is paged out or on its way and no automatic
/// mode is on. Thread-safe.
void stop_observing_if_idle();

bool observing_ops() noexcept;

/// Automatic mode: storages of at least `min_bytes` become entities as ops make
/// and use them. `disable` ends it. Thread-safe.
void track_storages(size_t min_bytes);
void stop_tracking_storages();
bool tracks_storages_of(size_t nbytes) noexcept;

/// The entity of an op's input; null where paging has nothing to do with it. In automatic
/// mode it becomes one.
EntityPtr entity_of_input(c10::StorageImpl& storage);

/// The calling thread is about to use the entities from `first` on, all pinned by now, so
/// that making room for one does not push another out. Calls their page-outs off, which
/// could not be committed now, and making room would wait for them; then pages in. With
/// `stay`, and while a graph is captured, they keep their addresses for good.
void use_pinned(const std::vector<EntityPtr>& entities, size_t first, bool stay);

/// The calling thread has been given an entity's address. It stays where it is until
/// the thread's next op, or its next call of ours: a kernel is launched with the addresses
/// of several tensors, and bringing the last of them in must not push the first one out.
void hold_raw(const EntityPtr& entity);
void let_go_of_raw();

/// Prepares a transfer worker: graph captures elsewhere do not restrict it.
void prepare_worker();

} // namespace torch_lms
