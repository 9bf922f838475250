#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/record_function.h>

#include <extension/access/Audition.h>
#include <extension/access/Frame.h>
#include <extension/access/OpTimes.h>
#include <extension/access/Recipes.h>

namespace torch_lms {

/// One op of a recorded cycle. Its place is its number in the cycle.
struct TraceOp {
  std::string name;
  uint64_t key = 0; ///< Of its name and its storages' sizes: what a later cycle's is compared with.
  bool backward = false;
  double duration_us = 0;
  size_t allocated_bytes = 0; ///< When it ended.
  size_t paged_out_bytes = 0; ///< The same.
  size_t peak_bytes = 0; ///< At its own allocations, with what was out; 0 if it made no large ones.
  std::vector<int32_t> inputs; ///< Storages, in order, by number.
  std::vector<bool> written; ///< Of these, which it may write to.
  std::vector<int32_t> outputs;
};

/// One storage of a recorded cycle.
struct TraceStorage {
  size_t nbytes = 0;
  bool recurring = false; ///< It was there before the cycle began.
  int32_t producer = -1; ///< The place of the op that made it.
  int32_t released = -1; ///< The place after which it had died.
  bool movable = true;
  bool raw_access = false; ///< Somebody took its address.
  std::vector<int32_t> ingredients; ///< What its recipe reads, by number.
  std::vector<int32_t> rewrites; ///< Places of ops that overwrite it and belong to its recipe.
  size_t outside_bytes = 0; ///< What it reads besides.
  std::string why_not_recompute; ///< Empty if it has a recipe.
  std::string module; ///< Of the program, where Python knows.
  std::string line;
};

struct RecordedCycle {
  std::string device;
  std::vector<TraceOp> ops;
  std::vector<TraceStorage> storages;
};

/// Note [What the program has let go of]
/// After which op a storage was released is told by nobody: the program lets go of its last
/// reference, and PyTorch's allocator, whose block it is, gets it back. (Only what is paged out has
/// a mark of ours.) So every storage that is alive is asked at every op, thousands of them. What
/// is asked is two words, which are read without a lock, and through no pointer but theirs; an
/// entity is looked into where they leave it open: it has been released, or is on its way out.

/// Records one cycle of a program: what its ops use and make, how long they take, and which of
/// their outputs could be made again.
///
/// Thread-safe: every method may be called from any thread. A cycle that several threads run
/// without backward is not recorded: their order means nothing. Blocks on a mutex, under which
/// the device's clock and allocator, entities and their table are asked; `end_op` runs an op
/// (`Audition`).
class Recorder {
 public:
  Recorder(Pager& pager, Recipes& recipes, Audition& audition)
      : pager_(pager), recipes_(recipes), audition_(audition) {}

  /// From the next cycle on, for one cycle.
  void begin(Device& device, std::function<size_t()> take_peak_bytes);
  void abandon();
  bool recording() const noexcept {
    return recording_.load(std::memory_order_acquire);
  }

  /// An outermost op begins, and has pinned its inputs; ends, and has made its outputs. `end_op`
  /// asks Python for the program's place.
  void begin_op(const at::RecordFunction& record, Frame& frame);
  void end_op(const at::RecordFunction& record, Frame& frame, bool backward);
  void note_raw_access(const EntityPtr& entity);

  /// The op that runs stops meanwhile, and goes on. No effect where none runs.
  void pause(Device& device) {
    times_.pause(device);
  }
  void resume(Device& device) noexcept {
    times_.resume(device);
  }

  /// The cycle has ended. Waits for the device. Null if it was none.
  std::unique_ptr<RecordedCycle> end();

  /// How many entities have been looked into to see whether they were released: see Note [What the
  /// program has let go of].
  size_t looks() {
    std::lock_guard<std::mutex> lock(mutex_);
    return looks_;
  }

 private:
  /// A storage that has not been released.
  struct Alive {
    const c10::StorageImpl* storage; ///< There as long as the entity.
    const Entity* entity;
    int32_t number;

    bool may_be_released() const noexcept;
  };

  /// Whether the cycle is recorded still in which the frame's op began.
  bool records_locked(const Frame& frame) const {
    return cycle_ != nullptr && frame.recording == generation_;
  }
  int32_t number_of(const EntityPtr& entity);
  void note_outputs(const at::RecordFunction& record, Frame& frame, int32_t place);
  int32_t note_output(
      const EntityPtr& entity,
      Frame& frame,
      int32_t place,
      const c10::StorageImpl* fresh,
      const std::string& verdict);
  void note_recipe(Frame& frame, TraceStorage& storage);
  void note_rewrite(Frame& frame, TraceStorage& storage, int32_t place);
  void note_released(int32_t place);
  size_t leaving_bytes_locked();

  Pager& pager_;
  Recipes& recipes_;
  Audition& audition_;
  OpTimes times_;
  std::atomic<bool> recording_{false};
  std::mutex mutex_; // guards what follows
  Device* device_ = nullptr;
  std::function<size_t()> take_peak_bytes_;
  uint64_t generation_ = 0; // of recordings
  uint64_t thread_ = 0;
  bool several_threads_ = false;
  std::unique_ptr<RecordedCycle> cycle_;
  std::vector<EntityPtr> entities_; // by number; they hold no storage
  std::vector<Alive> alive_;
  size_t looks_ = 0;
  std::vector<EntityPtr> leaving_; // the program has released them
  size_t leaving_bytes_ = 0; // as the op begins
  std::unordered_map<const Entity*, int32_t> numbers_;
};

/// The name and the sizes of what an op has pinned.
uint64_t key_of_op(const Frame& frame);

} // namespace torch_lms
