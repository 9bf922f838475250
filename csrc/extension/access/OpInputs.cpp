#include <extension/access/OpInputs.h>

#include <algorithm>

#include <c10/util/ScopeExit.h>

#include <extension/access/Storages.h>
#include <extension/base/ErrorText.h>
#include <extension/base/ThreadContext.h>

namespace torch_lms {
namespace {

/// Of the outermost op's own inputs, as LargeOps::make_fit counts: one that is given twice once.
size_t input_bytes_of(const Frame& frame) {
  size_t nbytes = 0;
  const auto end = frame.pinned.begin() + static_cast<ptrdiff_t>(frame.inputs);
  for (auto at = frame.pinned.begin(); at != end; ++at) {
    const bool first = std::find(frame.pinned.begin(), at, *at) == at;
    nbytes += first && &(*at)->device() == &frame.pinned.front()->device() ? (*at)->nbytes() : 0;
  }
  return nbytes;
}

} // namespace

/// What `pin` knows, and finds on its way.
struct OpInputs::Pinning {
  size_t from_bytes; // what ops look for
  bool any_recipes;
  bool settled = true;
  bool written = false; // the argument
  Device* noted = nullptr; // whose stream has been noted
  c10::Device noted_as = c10::kCPU;
  Device* asked = nullptr; // whether it captures
  size_t input_bytes = 0;
};

/// Also for what is no entity yet: if it is paged out next, this op comes first.
void OpInputs::note_stream(c10::Device as, Pinning& pinning) {
  Device* device = pager_.devices().known(as);
  if (device != nullptr && device != pinning.noted) {
    device->note_current_stream();
    pinning.noted = device;
    pinning.noted_as = as;
  }
}

/// The storage is as large as what ops look for.
void OpInputs::pin_input(c10::StorageImpl& storage, size_t nbytes, Frame& frame, Pinning& pinning) {
  Entity* entity = lookup_.find_sized(storage, nbytes, frame);
  if (entity == nullptr) {
    return;
  }
  frame.pinned.push_back(entity);
  const bool resident = entity->pin_settled();
  pinning.settled = pinning.settled && resident;
  if (&entity->device() != pinning.asked) {
    pinning.asked = &entity->device();
    pinning.settled = pinning.settled && !pinning.asked->capturing();
    frame.used.add(pinning.asked);
  }
  if (pinning.written && (!resident || entity->keeps_copy())) {
    frame.written.push_back(entity);
  }
  if (frame.timed) {
    pinning.input_bytes += entity->uses.last() != frame.now ? entity->nbytes() : 0;
    entity->uses.record(frame.now, policy_.cycles().shape(frame.cycle));
  }
  if (planning_.recording()) {
    frame.wrote.push_back(pinning.written);
  }
}

/// What is too small to be looked for costs a comparison.
C10_ALWAYS_INLINE void OpInputs::look_at_input(
    c10::StorageImpl& storage,
    Frame& frame,
    Pinning& pinning) {
  const c10::Device device = storage.device();
  if (device.type() == c10::kCUDA) {
    if (pinning.noted_as != device) {
      note_stream(device, pinning);
    }
  } else if (device.type() != c10::kCPU) {
    return;
  }
  if (pinning.written && pinning.any_recipes) {
    recipes_.before_write(storage);
  }
  const size_t nbytes = bytes_of(storage);
  if (nbytes >= pinning.from_bytes) {
    pin_input(storage, nbytes, frame, pinning);
  }
}

/// False if not all of the inputs could be seen.
bool OpInputs::pin(const at::RecordFunction& record, Frame& frame, const OpTraits& op) {
  const size_t first = frame.pinned.size();
  Pinning pinning{lookup_.from_bytes(), recipes_.any()};
  pinning.settled = op.kind != OpKind::kCollective && op.kind != OpKind::kInspecting;
  bool all = true;
  size_t argument = 0;
  for (const c10::IValue& value : inputs_of(record, op.arguments)) {
    pinning.written = op.writes(argument++);
    if (c10::StorageImpl* storage = only_storage_of(value)) {
      look_at_input(*storage, frame, pinning);
    } else if (!value.isNone()) {
      all = visit_storages(
                value, [&](c10::StorageImpl& part) { look_at_input(part, frame, pinning); }) &&
            all;
    }
  }
  if (frame.pinned.size() != first) {
    settle_pinned(record, frame, op.kind, first, all, pinning);
    for (size_t i = first; op.takes_addresses && i < frame.pinned.size(); ++i) {
      frame.kept_watch.add(*frame.pinned[i]);
    }
  }
  return all;
}

/// What has been pinned from `first` on: there is something.
C10_ALWAYS_INLINE void OpInputs::settle_pinned(
    const at::RecordFunction& record,
    Frame& frame,
    OpKind kind,
    size_t first,
    bool all,
    Pinning& pinning) {
  size_t input_bytes = pinning.input_bytes;
  if (input_bytes != 0 && all &&
      large_ops_.worth_looking(frame.pinned[first]->device(), input_bytes)) {
    frame.large = frame.large || first == 0;
    pinning.settled = !large_ops_.make_fit(record, frame, first) && pinning.settled;
  }
  if (!pinning.settled) {
    use_unsettled(pager_, frame, first, kind);
  }
  if (!frame.written.empty()) {
    for (Entity* entity : frame.written) { // also those that have just come in
      if (entity->keeps_copy()) {
        entity->release_copy();
      }
    }
    frame.written.clear();
  }
  if (frame.large && first == 0) {
    ThreadContext& context = this_thread();
    context.large_on = &frame.pinned[first]->device();
    context.before_op_bytes = pager_.held_bytes(*context.large_on);
    context.op_allocated_bytes = context.op_made_bytes = 0; // but for its inputs
  }
  for (const Entity* entity : frame.served) {
    input_bytes -= std::min(input_bytes, entity->nbytes());
  }
  this_thread().op_input_bytes += input_bytes; // that lie on the device
}

void OpInputs::bring(const at::RecordFunction& record, Frame& frame) {
  for (const c10::IValue& value : inputs_of(record)) {
    visit_storages(value, [&](c10::StorageImpl& storage) {
      const c10::DeviceType type = storage.device_type();
      Entity* entity =
          type == c10::kCPU || type == c10::kCUDA ? lookup_.find(storage, frame) : nullptr;
      if (entity == nullptr) {
        return;
      }
      const bool settled = entity->pin_settled();
      const auto at_end = c10::make_scope_exit([&] { entity->unpin(); });
      if (!settled) {
        entity->device().note_current_stream(); // so that its block is kept for it
        if (pager_.use(entity_of(entity->shared_from_this())) == Place::kHost) {
          entity->end_service();
        }
      }
    });
  }
}

void OpInputs::refuse_dropped(const at::RecordFunction& record, const std::exception& error) {
  for (const c10::IValue& value : inputs_of(record)) {
    visit_storages(value, [&](c10::StorageImpl& storage) {
      const EntityPtr entity = has_bytes(storage) ? pager_.find(storage) : nullptr;
      if (entity != nullptr && entity->state() == EntityState::kDropped) {
        entity->refuse(text_of(error));
      }
    });
  }
}

void OpInputs::note_refused(const at::RecordFunction& record, const Frame& frame) {
  const size_t input_bytes = frame.timed ? input_bytes_of(frame) : 0;
  if (input_bytes != 0) {
    large_ops_.note_refused(record, input_bytes, frame.pinned.front()->device().limit_bytes());
  }
}

void OpInputs::note_made(const at::RecordFunction& record, const Frame& frame) {
  large_ops_.note_made(record, input_bytes_of(frame), this_thread().op_made_bytes);
}

/// All inputs are pinned by now, so that making room for one does not push another out. Calls
/// their page-outs off, which could not be committed now, and making room would wait for them;
/// then pages in.
void use_unsettled(Pager& pager, Pinned& pinned, size_t first, OpKind kind) {
  std::vector<EntityPtr> entities;
  for (size_t i = first; i < pinned.pinned.size(); ++i) {
    entities.push_back(entity_of(pinned.pinned[i]->shared_from_this()));
    pager.requests().call_off_pageout(entities.back());
  }
  for (const EntityPtr& entity : entities) {
    if (kind == OpKind::kCollective || entity->device().capturing()) {
      entity->fix();
    }
    const bool served =
        std::find(pinned.served.begin(), pinned.served.end(), entity.get()) != pinned.served.end();
    if (!served && pager.use(entity) == Place::kHost) {
      pinned.served.push_back(entity.get());
    }
    if (kind == OpKind::kInspecting) {
      entity->stop_watching();
    }
  }
}

} // namespace torch_lms
