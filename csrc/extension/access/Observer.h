#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <vector>

#include <ATen/record_function.h>

#include <extension/access/Chaos.h>
#include <extension/access/Frame.h>
#include <extension/access/LargeOps.h>
#include <extension/access/OpKind.h>
#include <extension/access/Planning.h>
#include <extension/access/Recipes.h>
#include <extension/policy/Policy.h>

namespace torch_lms {

/// Note [The program's thread]
/// A cycle is what one thread repeats, with the backwards that it runs: Python's main thread, or
/// the one that has made what the latest backward began with. Others load data and look after
/// things. What they run is no part of a cycle, ends none, and is not looked for in a plan; what
/// they need of what a plan has moved comes back for them as for any op.

/// Layer 2: one global RecordFunction callback pins an op's inputs and pages them in before the
/// op, and lets them go after it. It changes no dispatch keys and sees every thread.
///
/// The callback is installed while something is paged out or on its way, and while automatic mode
/// learns or is armed; otherwise ops cost nothing. Ops that were running when it was installed
/// are not observed.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL.
class Observer final : public OpFeed {
 public:
  /// One in a process.
  Observer(Pager& pager, Policy& policy, Recipes& recipes, Planning& planning, Chaos& chaos);

  // --- OpFeed: automatic mode ---
  void start() override;
  void stop() override;
  void backward_ended() override;
  void wait_begins(Device& device) override;
  void wait_ends(Device& device) noexcept override;

  /// Ops are observed while one of these lives, and from then on as long as there is reason to.
  class Request {
   public:
    explicit Request(Observer& observer);
    ~Request();
    Request(const Request&) = delete;
    Request& operator=(const Request&) = delete;

    /// Whether nobody observed ops before it: see `Device::note_busy_streams`.
    bool first() const noexcept {
      return first_;
    }

   private:
    Observer& observer_;
    bool first_;
  };

  /// Removes the callback if there is no more reason for it.
  void stop_if_idle();

  /// Whether Python has other threads than the one that asks now: see Note [Ops that began unseen].
  /// False where nobody says it.
  void note_other_threads(bool others) noexcept {
    other_threads_.store(others, std::memory_order_relaxed);
  }

  /// What was asked for by hand is over: all has been brought back.
  void end_requests();

  /// The callback neither comes nor goes until `release_callbacks`, and threads have learnt of the
  /// last change: see Note [Locks that a forked child takes]. Waits for up to a millisecond.
  void hold_callbacks();
  void release_callbacks();

  bool observing() const noexcept {
    return installed_.load(std::memory_order_acquire);
  }

  /// The calling thread is given a storage's address, to read and to write: the bytes come in,
  /// and stay where they are until the thread's next op or call of ours that is not inside the
  /// same function of another extension (Note [Foreign calls]). May wait as `Pager::use` does.
  void give_out(c10::StorageImpl& storage);

  /// Somebody is about to have a storage's address, and may write to it: what has been dropped and
  /// is made from its bytes comes back first.
  void before_raw_access(c10::StorageImpl& storage) {
    recipes_.before_write(storage);
  }

  /// What has been given out to the calling thread may go again.
  void take_back();

  /// Makes storages known that automatic mode tracks, and that nobody may be using: see Note
  /// [Learn, sleep, arm].
  void discover(const std::vector<c10::Storage>& storages);

  /// Pins storages' entities (those that automatic mode tracks become ones) and brings them in:
  /// raw kernels run on them. To be released with `release`.
  void hold(const std::vector<c10::Storage>& storages, Pinned& held);
  void release(Pinned& held);

 private:
  static std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& record);
  static void on_end(const at::RecordFunction& record, at::ObserverContext* context);
  void begin(const at::RecordFunction& record);
  void begin_inside(const at::RecordFunction& record, Frame& frame);
  void begin_op(
      const at::RecordFunction& record,
      const char* name,
      Frame& frame,
      const OpTraits& op);
  void tell_begin(const at::RecordFunction& record, Frame& frame);
  void end(const at::RecordFunction& record);
  void refuse_dropped(const at::RecordFunction& record, const std::exception& error);
  void begin_outermost(const at::RecordFunction& record, const char* name, Frame& frame);
  struct Pinning;
  void note_stream(c10::Device device, Pinning& pinning);
  void pin_input(c10::StorageImpl& storage, size_t nbytes, Frame& frame, Pinning& pinning);
  void look_at_input(c10::StorageImpl& storage, Frame& frame, Pinning& pinning);
  bool pin_inputs(const at::RecordFunction& record, Frame& frame, const OpTraits& op);
  void settle_pinned(
      const at::RecordFunction& record,
      Frame& frame,
      OpKind kind,
      size_t first,
      bool all,
      Pinning& pinning);
  void bring_inputs(const at::RecordFunction& record, Frame& frame);
  void use_unsettled(Pinned& frame, size_t first, OpKind kind);
  void note_end(const at::RecordFunction& record, Frame& frame);
  void tell_policy(const at::RecordFunction& record, Frame& frame);
  void note_output(c10::StorageImpl& storage, size_t from_bytes, Frame& frame);
  void note_outputs(const at::RecordFunction& record, Frame& frame);
  void note_recipe(const at::RecordFunction& record, Frame& frame);
  void release_pinned(Frame& frame) noexcept;
  void note_program_thread();
  bool in_program(Frame& frame, bool backward) const;
  Entity* find(c10::StorageImpl& storage, Frame& frame);
  EntityPtr find_or_track(c10::StorageImpl& storage, bool by_hand);
  EntityPtr entity_for_address(c10::StorageImpl& storage);
  void raw_access(c10::StorageImpl& storage);
  bool note_access_in_op(c10::StorageImpl& storage);
  void lend(c10::StorageImpl& storage, const NativeCall& call);
  void give(const EntityPtr& entity, const NativeCall& call);
  void take_back_returned(Frame& frame);
  Entity* find_sized(c10::StorageImpl& storage, size_t nbytes, Frame& frame);
  size_t looked_for_from_bytes() const noexcept;
  void install(bool outputs);
  void uninstall();
  bool wanted() const;

  Pager& pager_;
  Policy* const policy_;
  Recipes& recipes_;
  Planning& planning_;
  Chaos& chaos_;
  LargeOps large_ops_;
  std::mutex mutex_; // of who installs and removes
  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
  bool outputs_ = false;
  std::chrono::steady_clock::time_point changed_at_{}; // when it came or went
  std::atomic<bool> fed_{false}; // by `start`
  std::atomic<uint64_t> program_thread_{0}; // besides the main one; by PyTorch's numbers
  std::atomic<bool> installed_{false};
  std::atomic<size_t> requests_{0};
  std::atomic<bool> requested_{false}; // by hand, since `end_requests`
  std::atomic<bool> other_threads_{false};
};

} // namespace torch_lms
