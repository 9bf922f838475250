#include <extension/access/Executor.h>

#include <algorithm>
#include <utility>

#include <extension/access/Recorder.h>
#include <extension/access/Storages.h>
#include <extension/base/ForeignCall.h>
#include <extension/transfer/PageoutBatch.h>

namespace torch_lms {
namespace {

constexpr size_t kPlacesToLookAhead = 64;
constexpr double kShareInStep = 0.95;
constexpr int kBadCycles = 3;
constexpr size_t kMostPlans = 8;

/// Whether they are plans of one recording, whose numbers stand for the same storages.
bool have_same_numbers(const CompiledPlan& one, const CompiledPlan& other) {
  return one.recurring == other.recurring && std::equal(
                                                 one.ops.begin(),
                                                 one.ops.end(),
                                                 other.ops.begin(),
                                                 other.ops.end(),
                                                 [](const PlannedOp& a, const PlannedOp& b) {
                                                   return a.key == b.key && a.inputs == b.inputs &&
                                                          a.outputs == b.outputs;
                                                 });
}

} // namespace

void Executor::add(std::shared_ptr<const CompiledPlan> plan) {
  std::lock_guard<std::mutex> lock(mutex_);
  plans_.erase(
      std::remove_if(
          plans_.begin(),
          plans_.end(),
          [&](const auto& known) { return begin_alike(*known, *plan); }),
      plans_.end());
  if (plans_.size() == kMostPlans) {
    plans_.erase(plans_.begin());
  }
  plans_.push_back(std::move(plan));
}

bool Executor::withdraw(
    const std::shared_ptr<const CompiledPlan>& plan,
    std::shared_ptr<const CompiledPlan> instead) {
  bool replaced = false;
  std::vector<Bound> bound; // destroyed after unlocking
  {
    std::lock_guard<std::mutex> lock(mutex_);
    plans_.erase(std::remove(plans_.begin(), plans_.end(), plan), plans_.end());
    replaced = std::any_of(plans_.begin(), plans_.end(), [&](const auto& other) {
      return begin_alike(*other, *plan);
    });
    if (!replaced && instead != nullptr) {
      plans_.push_back(std::move(instead));
      replaced = true;
    }
    bound.swap(bound_);
    prefetches_.clear();
    followed_ = nullptr;
    start_cycle_locked(bound);
  }
  policy_.placeholders().release();
  return replaced;
}

void Executor::clear() {
  std::vector<Bound> bound; // destroyed after unlocking
  {
    std::lock_guard<std::mutex> lock(mutex_);
    active_.store(false, std::memory_order_release);
    plans_.clear();
    take_plan_locked(nullptr);
    expect_locked(0);
    followed_ = nullptr;
    bound.swap(bound_);
    prefetches_.clear();
  }
  policy_.placeholders().release();
}

void Executor::doubt() {
  std::lock_guard<std::mutex> lock(mutex_);
  bad_cycles_ = kBadCycles - 1;
}

/// Under the mutex.
void Executor::take_plan_locked(std::shared_ptr<const CompiledPlan> plan) {
  if (plan_ == plan) {
    return;
  }
  plan_ = std::move(plan);
  prefetches_.set_limit(plan_ != nullptr ? plan_->limit_bytes : SIZE_MAX);
  keys_.reset();
  if (plan_ != nullptr) {
    for (const PlannedOp& op : plan_->ops) {
      keys_.set(op.key % keys_.size());
    }
  }
}

/// Under the mutex.
void Executor::expect_locked(size_t place) {
  next_ = place;
  const bool known = plan_ != nullptr && place < plan_->ops.size();
  room_bytes_.store(known ? plan_->ops[place].room_bytes : SIZE_MAX, std::memory_order_relaxed);
}

/// `before`: what stood for the numbers of the last cycle's plan.
void Executor::start_cycle_locked(std::vector<Bound>& before) {
  seen_.clear();
  found_ = 0;
  held_at_ = -1;
  missed_.store(0, std::memory_order_relaxed);
  const auto last = plan_;
  take_plan_locked(plans_.empty() ? nullptr : plans_.back());
  expect_locked(0);
  bound_.assign(plan_ != nullptr ? plan_->recurring.size() : 0, Bound());
  if (plan_ == last || (plan_ != nullptr && last != nullptr && have_same_numbers(*plan_, *last))) {
    for (size_t number = 0; number < bound_.size(); ++number) {
      if (plan_->recurring[number]) {
        bound_[number].entity = before[number].entity;
      }
    }
  }
  active_.store(plan_ != nullptr, std::memory_order_release);
}

bool Executor::end_cycle() {
  policy_.placeholders().release(); // none, if the cycle was as planned
  std::vector<Bound> bound; // destroyed after unlocking
  std::lock_guard<std::mutex> lock(mutex_);
  const bool planned = plan_ != nullptr && !seen_.empty();
  if (planned) {
    const size_t most = std::max(seen_.size(), plan_->ops.size());
    const double share = static_cast<double>(found_) / static_cast<double>(most);
    share_.store(share, std::memory_order_relaxed);
    bad_cycles_ = share < kShareInStep ? bad_cycles_ + 1 : 0;
  }
  followed_ = planned && bad_cycles_ == 0 ? plan_ : nullptr;
  const bool none = plans_.empty();
  const bool bad = bad_cycles_ >= kBadCycles;
  if (bad) {
    bad_cycles_ = 0;
  }
  bound.swap(bound_);
  held_back_.store(prefetches_.end_cycle(), std::memory_order_relaxed);
  if (followed_ == nullptr) {
    prefetches_.clear(); // else they are for the cycle that begins
  }
  start_cycle_locked(bound);
  return none || bad;
}

std::shared_ptr<const CompiledPlan> Executor::followed() {
  std::lock_guard<std::mutex> lock(mutex_);
  return followed_;
}

/// Under the mutex. -1 for an op that the plan does not know.
int32_t Executor::place_of_locked(uint64_t key, std::vector<Bound>* garbage) {
  const auto fits = [&](const CompiledPlan& plan, size_t place) {
    return place < plan.ops.size() && plan.ops[place].key == key;
  };
  if (!fits(*plan_, next_) && next_ == seen_.size()) { // in step so far: another plan, perhaps
    for (const auto& other : plans_) {
      bool alike = fits(*other, next_);
      for (size_t place = 0; alike && place < seen_.size(); ++place) {
        alike = other->ops[place].key == seen_[place];
      }
      if (alike) {
        take_plan_locked(other);
        held_at_ = -1;
        garbage->swap(bound_);
        bound_.assign(plan_->recurring.size(), Bound());
        break;
      }
    }
  }
  seen_.push_back(key);
  // Most ops of another program are in no place: to look at each would take longer than the op.
  const size_t end = keys_.test(key % keys_.size()) ? next_ + kPlacesToLookAhead : next_;
  for (size_t place = next_; place < end; ++place) {
    if (fits(*plan_, place)) {
      expect_locked(place + 1);
      ++found_;
      missed_.store(0, std::memory_order_relaxed);
      return static_cast<int32_t>(place);
    }
  }
  missed_.fetch_add(1, std::memory_order_relaxed);
  room_bytes_.store(SIZE_MAX, std::memory_order_relaxed); // nobody knows what comes next
  return -1;
}

/// Under the mutex.
void Executor::bind_inputs_locked(const PlannedOp& op, Frame& frame, std::vector<Bound>* garbage) {
  size_t at = 0;
  for (Entity* entity : frame.pinned) {
    if (entity->device().device() != plan_->device) {
      continue;
    }
    if (at < op.inputs.size()) {
      Bound& bound = bound_[static_cast<size_t>(op.inputs[at])];
      if (bound.entity.expired()) {
        garbage->push_back(
            std::exchange(
                bound,
                Bound{entity_of(entity->shared_from_this()), nullptr, 0})); // another's recipe
      }
    }
    ++at;
  }
}

void Executor::begin_op(const at::RecordFunction& record, Frame& frame) {
  const uint64_t key = key_of_op(frame);
  bool makes_recipe = false;
  {
    std::vector<Bound> garbage; // destroyed after unlocking: it may hold the last of a storage
    std::lock_guard<std::mutex> lock(mutex_);
    frame.place = plan_ != nullptr ? place_of_locked(key, &garbage) : -1;
    if (frame.place < 0) {
      return;
    }
    const PlannedOp& op = plan_->ops[static_cast<size_t>(frame.place)];
    frame.binds = op.binds;
    if (op.binds) {
      bind_inputs_locked(op, frame, &garbage);
    }
    makes_recipe = !op.remade.empty();
    frame.acts =
        !(op.drops.empty() && op.pageouts.empty() && op.prefetches.empty() &&
          plan_->placeholders.empty());
  }
  policy_.placeholders().release_until(frame.place);
  if (makes_recipe && frame.sealed) {
    frame.recipe = recipes_.capture(record);
  }
  if (frame.recipe != nullptr) {
    frame.before = audition_.copy_overwritten(*frame.recipe);
  }
}

void Executor::end_op(const at::RecordFunction& record, Frame& frame) {
  const std::shared_ptr<OpRecipe> recipe = std::move(frame.recipe);
  if (!std::exchange(frame.binds, false)) {
    return;
  }
  std::shared_ptr<const CompiledPlan> plan;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    plan = plan_;
  }
  const auto place = static_cast<size_t>(frame.place);
  if (frame.place < 0 || plan == nullptr || place >= plan->ops.size() || !plan->ops[place].binds) {
    return;
  }
  const std::vector<at::Tensor> made = tensors_in(outputs_of(record));
  const std::vector<c10::StorageImpl*> fresh =
      recipe != nullptr && recipes_.finish(recipe, made) &&
              audition_.try_out(*recipe, made, frame.before).empty()
          ? recipes_.note_made(recipe, made)
          : std::vector<c10::StorageImpl*>(made.size(), nullptr);
  const PlannedOp& op = plan->ops[place];
  size_t at = 0;
  for (size_t i = 0; i < made.size(); ++i) {
    const EntityPtr entity = pager_.find(made[i]);
    if (entity == nullptr || entity->device().device() != plan->device) {
      continue;
    }
    const int32_t number = at < op.outputs.size() ? op.outputs[at] : -1;
    // A recipe holds what it reads: nobody keeps one of what stays.
    const bool dropped = std::count(op.remade.begin(), op.remade.end(), number) != 0;
    bind_output(plan, number, Bound{entity, fresh[i] != nullptr && dropped ? recipe : nullptr, i});
    ++at;
  }
}

/// Unless another plan is carried out by now, or the plan does not know it: `number` is below 0
/// then.
void Executor::bind_output(
    const std::shared_ptr<const CompiledPlan>& plan,
    int32_t number,
    Bound bound) {
  std::lock_guard<std::mutex> lock(mutex_); // arguments are destroyed after unlocking
  if (number < 0 || plan != plan_) {
    return;
  }
  Bound& known = bound_[static_cast<size_t>(number)];
  const bool same =
      !known.entity.owner_before(bound.entity) && !bound.entity.owner_before(known.entity);
  // What an op gives out may be another's, as with _unsafe_view: that one makes it again.
  if (!same || bound.recipe != nullptr) {
    std::swap(known, bound);
  }
}

/// What is to be held from this place on; now and then also what could not be held so far.
void Executor::hold_placeholders(int32_t place) {
  constexpr int32_t kPlacesBetweenTries = 16;
  std::shared_ptr<const CompiledPlan> plan;
  int32_t before = -1;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    plan = plan_;
    before = std::exchange(held_at_, place);
  }
  if (plan == nullptr || plan->placeholders.empty()) {
    return;
  }
  if (before < 0) {
    policy_.placeholders().release(); // of another plan
  }
  bool due = place % kPlacesBetweenTries == 0;
  for (const PlannedBlock& block : plan->placeholders) {
    if (before < block.since && block.since <= place && place < block.until) {
      policy_.placeholders().want(block.nbytes, block.until);
      due = true;
    }
  }
  if (due) {
    policy_.hold_placeholders(*pager_.devices().find(plan->device));
  }
}

void Executor::wait_for_pageouts() {
  std::shared_ptr<const CompiledPlan> plan;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    plan = plan_;
  }
  if (plan != nullptr) {
    policy_.wait_for_pageouts(
        *pager_.devices().find(plan->device), room_bytes_.load(std::memory_order_relaxed));
  }
}

/// Under the mutex. What is to leave after an op; what is to come in is noted.
Executor::Leaving Executor::leaving_after_locked(const PlannedOp& op) {
  Leaving leaving;
  for (const int32_t number : op.drops) {
    Bound& bound = bound_[static_cast<size_t>(number)];
    leaving.drops.push_back(bound);
    if (!std::count(op.drops_again.begin(), op.drops_again.end(), number)) {
      bound.recipe = nullptr; // what it needs may go with the storage
    }
  }
  for (const int32_t number : op.pageouts) {
    if (EntityPtr entity = bound_[static_cast<size_t>(number)].entity.lock()) {
      leaving.pageouts.push_back(std::move(entity));
    }
  }
  for (const int32_t number : op.prefetches) {
    if (EntityPtr entity = bound_[static_cast<size_t>(number)].entity.lock()) {
      prefetches_.add(std::move(entity));
    }
  }
  return leaving;
}

void Executor::after_op(Frame& frame) {
  const int32_t place = std::exchange(frame.place, -1);
  if (place < 0 || !frame.acts) {
    return;
  }
  Leaving leaving; // destroyed after unlocking
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (plan_ == nullptr || static_cast<size_t>(place) >= plan_->ops.size()) {
      return;
    }
    leaving = leaving_after_locked(plan_->ops[static_cast<size_t>(place)]);
  }
  // The stack is looked at only where something leaves: that takes longer than the rest of an op.
  if (!(leaving.drops.empty() && leaving.pageouts.empty()) && !in_foreign_call()) {
    for (const Bound& bound : leaving.drops) {
      const EntityPtr entity = bound.entity.lock();
      if (entity != nullptr && bound.recipe != nullptr) {
        recipes_.drop(entity, bound.recipe, bound.output);
      }
    }
    for (const EntityPtr& entity : leaving.pageouts) {
      pager_.requests().evict(entity);
    }
  }
  hold_placeholders(place);
}

} // namespace torch_lms
