#include <extension/access/Recorder.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include <c10/util/ScopeExit.h>
#include <c10/util/hash.h>
#include <entity/OpClock.h>

#include <extension/access/Storages.h>
#include <extension/base/Interpreter.h>

namespace torch_lms {
namespace {

/// The four leading bits: a cache that grows by a token is the same.
size_t about(size_t nbytes) {
  size_t low = 0;
  for (size_t rest = nbytes; rest > 15; rest >>= 1) {
    ++low;
  }
  return nbytes >> low << low;
}

} // namespace

uint64_t key_of_op(const Frame& frame) {
  size_t key = frame.name;
  for (const Entity* entity : frame.pinned) {
    key = c10::hash_combine(key, about(entity->nbytes()));
  }
  return key;
}

void Recorder::begin(Device& device, std::function<size_t()> take_peak_bytes) {
  std::vector<EntityPtr> leaving; // of the cycle before
  pager_.table().for_each([&](const EntityPtr& entity) {
    if (&entity->device() == &device && entity->is_leaving()) {
      leaving.push_back(entity);
    }
  });
  std::lock_guard<std::mutex> lock(mutex_);
  device_ = &device;
  take_peak_bytes_ = std::move(take_peak_bytes);
  thread_ = 0;
  several_threads_ = false;
  ++generation_;
  cycle_ = std::make_unique<RecordedCycle>();
  cycle_->device = device.device().str();
  times_.begin(device, OpTimes::Lead::kMade);
  entities_.clear();
  alive_.clear();
  leaving_ = std::move(leaving);
  numbers_.clear();
  recording_.store(true, std::memory_order_release);
}

void Recorder::abandon() {
  std::lock_guard<std::mutex> lock(mutex_);
  recording_.store(false, std::memory_order_release);
  cycle_ = nullptr;
  times_.abandon();
  alive_.clear();
  entities_.clear();
}

/// Under the mutex.
int32_t Recorder::number_of(const EntityPtr& entity) {
  const auto known = numbers_.emplace(entity.get(), static_cast<int32_t>(entities_.size()));
  if (known.second) {
    entities_.push_back(entity);
    alive_.push_back({&entity->storage(), entity.get(), known.first->second});
    TraceStorage storage;
    storage.nbytes = entity->nbytes();
    storage.recurring = true; // unless an op turns out to make it
    storage.why_not_recompute = "no op of this cycle made it";
    cycle_->storages.push_back(std::move(storage));
  }
  return known.first->second;
}

void Recorder::begin_op(const at::RecordFunction& record, Frame& frame) {
  frame.recipe = frame.sealed ? recipes_.capture(record, /*to_look_at=*/true) : nullptr;
  if (frame.recipe != nullptr) {
    frame.before = audition_.copy_overwritten(*frame.recipe);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (cycle_ == nullptr) {
    return;
  }
  note_released(static_cast<int32_t>(cycle_->ops.size()) - 1);
  TraceOp op;
  op.name = record.name();
  op.key = key_of_op(frame);
  frame.place = static_cast<int32_t>(cycle_->ops.size());
  frame.recording = generation_;
  for (size_t i = 0; i < frame.pinned.size(); ++i) {
    if (&frame.pinned[i]->device() == device_) {
      op.inputs.push_back(number_of(entity_of(frame.pinned[i]->shared_from_this())));
      op.written.push_back(i >= frame.wrote.size() || frame.wrote[i]);
    }
  }
  cycle_->ops.push_back(std::move(op));
  leaving_bytes_ = leaving_bytes_locked();
  take_peak_bytes_();
  times_.begin_op(frame.place);
}

bool Recorder::Alive::may_be_released() const noexcept {
  return is_leaving(entity->state()) || entity->replaced() || has_expired(*storage);
}

/// Under the mutex. See Note [What the program has let go of].
void Recorder::note_released(int32_t place) {
  alive_.erase(
      std::remove_if(
          alive_.begin(),
          alive_.end(),
          [&](const Alive& alive) {
            if (!alive.may_be_released()) {
              return false;
            }
            ++looks_;
            const auto number = static_cast<size_t>(alive.number);
            const EntityPtr& entity = entities_[number];
            const bool leaves = entity->is_leaving();
            const bool dead = leaves || entity->gone();
            if (leaves) {
              leaving_.push_back(entity);
            }
            if (dead) {
              cycle_->storages[number].released = place;
            }
            return dead;
          }),
      alive_.end());
}

/// Under the mutex. How long a page-out takes is none of the program's doing.
size_t Recorder::leaving_bytes_locked() {
  leaving_.erase(
      std::remove_if(
          leaving_.begin(),
          leaving_.end(),
          [](const EntityPtr& entity) { return !entity->is_leaving(); }),
      leaving_.end());
  return std::accumulate(
      leaving_.begin(), leaving_.end(), size_t{0}, [](size_t sum, const EntityPtr& entity) {
        return sum + entity->nbytes();
      });
}

void Recorder::end_op(const at::RecordFunction& record, Frame& frame, bool backward) {
  const int32_t place = std::exchange(frame.place, -1);
  // Whose storages may need Python's lock to go, which who waits for the mutex may have.
  const auto after_unlocking = c10::make_scope_exit([&] { frame.recipe = nullptr; });
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (place < 0 || !records_locked(frame)) {
      return;
    }
    TraceOp& op = cycle_->ops[static_cast<size_t>(place)];
    times_.end_op(place);
    op.backward = backward;
    const bool copied = frame.before && frame.before.device() == device_->device();
    const size_t copy_bytes = copied ? frame.before.nbytes() : 0;
    const size_t ours_before = leaving_bytes_ + copy_bytes; // as far as the op may have met it
    const size_t ours = leaving_bytes_locked() + copy_bytes;
    const size_t allocated_bytes = device_->use().allocated_bytes;
    op.allocated_bytes = allocated_bytes - std::min(allocated_bytes, ours);
    op.paged_out_bytes = pager_.off_device_bytes();
    const size_t peak_bytes = take_peak_bytes_();
    op.peak_bytes = peak_bytes - std::min(peak_bytes, ours_before);
    const uint64_t thread = backward ? 0 : OpClock::this_thread();
    several_threads_ = several_threads_ || (thread != 0 && thread_ != 0 && thread != thread_);
    thread_ = thread != 0 ? thread : thread_;
  }
  note_outputs(record, frame, place);
}

void Recorder::note_outputs(const at::RecordFunction& record, Frame& frame, int32_t place) {
  const std::vector<at::Tensor> made = tensors_in(outputs_of(record));
  std::string verdict = "its op cannot be run again with the same result";
  std::vector<c10::StorageImpl*> fresh(made.size(), nullptr);
  if (frame.recipe != nullptr && recipes_.finish(frame.recipe, made)) {
    verdict = audition_.try_out(*frame.recipe, made, frame.before);
    fresh = recipes_.note_made(frame.recipe, made);
  }
  std::pair<std::string, std::string> where;
  bool asked = interpreter().where == nullptr;
  std::vector<int32_t> remakable; // one may be made from another, so all get their numbers first
  for (size_t i = 0; i < made.size(); ++i) {
    const EntityPtr entity = pager_.find(made[i]);
    if (entity == nullptr) {
      continue;
    }
    if (!std::exchange(asked, true)) {
      where = interpreter().where(); // takes the GIL, whose holder may wait for the mutex
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (!records_locked(frame) || &entity->device() != device_) {
      continue;
    }
    const int32_t number = note_output(entity, frame, place, fresh[i], verdict);
    if (number < 0) {
      continue; // made before
    }
    TraceStorage& storage = cycle_->storages[static_cast<size_t>(number)];
    std::tie(storage.module, storage.line) = where;
    if (storage.why_not_recompute.empty()) {
      remakable.push_back(number);
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (records_locked(frame)) {
    for (const int32_t number : remakable) {
      note_recipe(frame, cycle_->storages[static_cast<size_t>(number)]);
    }
  }
}

/// Under the mutex. `fresh`: its storage, if the op may be run again to make it, unless `verdict`
/// says why not. Returns its number; -1 if it was there before the op.
int32_t Recorder::note_output(
    const EntityPtr& entity,
    Frame& frame,
    int32_t place,
    const c10::StorageImpl* fresh,
    const std::string& verdict) {
  const bool is_new = numbers_.count(entity.get()) == 0;
  const int32_t number = number_of(entity);
  cycle_->ops[static_cast<size_t>(place)].outputs.push_back(number);
  TraceStorage& storage = cycle_->storages[static_cast<size_t>(number)];
  const bool overwritten = fresh != nullptr && frame.recipe->overwrites() == fresh;
  if (!is_new) {
    if (overwritten && verdict.empty()) {
      note_rewrite(frame, storage, place);
    }
    return -1;
  }
  storage.recurring = false;
  storage.producer = place;
  storage.why_not_recompute = (fresh != nullptr && !overwritten) || !verdict.empty()
                                  ? verdict
                                  : "it shares memory, or is random";
  return number;
}

/// Under the mutex.
void Recorder::note_recipe(Frame& frame, TraceStorage& storage) {
  for (const c10::Storage& input : frame.recipe->inputs()) {
    const EntityPtr entity = input ? pager_.find(*input.unsafeGetStorageImpl()) : nullptr;
    if (entity != nullptr && &entity->device() == device_) {
      storage.ingredients.push_back(number_of(entity));
    } else if (input) {
      storage.outside_bytes += input.nbytes();
    }
  }
}

/// Under the mutex.
void Recorder::note_rewrite(Frame& frame, TraceStorage& storage, int32_t place) {
  if (storage.producer >= 0 && storage.why_not_recompute.empty() &&
      storage.rewrites.size() + 1 < OpRecipe::kMostSteps) {
    storage.rewrites.push_back(place);
    note_recipe(frame, storage);
  }
}

void Recorder::note_raw_access(const EntityPtr& entity) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto known = numbers_.find(entity.get());
  if (cycle_ != nullptr && known != numbers_.end()) {
    cycle_->storages[static_cast<size_t>(known->second)].raw_access = true;
  }
}

std::unique_ptr<RecordedCycle> Recorder::end() {
  std::unique_ptr<RecordedCycle> cycle;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    recording_.store(false, std::memory_order_release);
    if (cycle_ == nullptr) {
      return nullptr;
    }
    note_released(static_cast<int32_t>(cycle_->ops.size()) - 1);
    for (const Alive& alive : alive_) {
      cycle_->storages[static_cast<size_t>(alive.number)].movable = !alive.entity->fixed();
    }
    cycle = std::move(cycle_);
    alive_.clear();
    entities_.clear();
    numbers_.clear();
    if (several_threads_) {
      times_.abandon();
      return nullptr;
    }
  }
  const std::vector<double> times_us = times_.end(cycle->ops.size()).device_us;
  for (size_t place = 0; place < times_us.size(); ++place) {
    cycle->ops[place].duration_us = times_us[place];
  }
  return times_us.size() == cycle->ops.size() ? std::move(cycle) : nullptr;
}

} // namespace torch_lms
