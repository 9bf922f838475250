#include <extension/policy/MemoryReport.h>

#include <algorithm>
#include <sstream>

#include <extension/base/ThreadContext.h>

namespace torch_lms {
namespace {

/// A limit that would do, where `nbytes` would just do at one moment: small tensors, which do not
/// move, come and go, and the next op may find a few more of them.
size_t with_small_ones(size_t nbytes) noexcept {
  constexpr size_t kStepBytes = size_t{64} << 10;
  return (nbytes + nbytes / 256 + kStepBytes - 1) / kStepBytes * kStepBytes;
}

const char* text_of(Refusal why) noexcept {
  switch (why) {
    case Refusal::kPageoutsFail:
      return "page-outs have failed";
    case Refusal::kPageoutsTakeLong:
      return "page-outs have taken too long";
    case Refusal::kNothingToGo:
      return "nothing was there to go, and no thread has let go of anything";
    default:
      return "the device's allocator has no such block";
  }
}

} // namespace

MemoryReport report_memory(Device& device, PolicyState& state, const Wakefulness& wakefulness) {
  MemoryReport report;
  const DeviceUse use = device.use();
  report.limit_bytes = device.limit_bytes();
  report.allocated_bytes = use.allocated_bytes;
  report.reserved_bytes = use.reserved_bytes;
  size_t known = 0;
  const uint64_t eligible_from = wakefulness.eligible_from();
  state.pager.table().for_each([&](const EntityPtr& entity) {
    const EntityState where = entity->state();
    if (&entity->device() != &device || entity->gone() || where == EntityState::kPagedOut ||
        where == EntityState::kInQueued || where == EntityState::kDropped) {
      return;
    }
    known += entity->nbytes();
    (entity->fixed()                                                ? report.fixed_bytes
     : where != EntityState::kResident                              ? report.leaving_bytes
     : entity->pinned()                                             ? report.in_use_bytes
     : wakefulness.enabled() && entity->uses.last() < eligible_from ? report.unseen_bytes
                                                                    : report.movable_bytes) +=
        entity->nbytes();
  });
  report.held_bytes = state.placeholders.held_bytes(device.device());
  known += report.held_bytes;
  report.other_bytes = use.allocated_bytes - std::min(use.allocated_bytes, known);
  return report;
}

std::string text_of_refusal(Device& device, size_t nbytes, const MemoryReport& held) {
  const char* op = this_thread().op_name;
  const Refusal why = this_thread().refusal;
  std::ostringstream text;
  const size_t goes = why == Refusal::kPageoutsFail ? 0 : held.movable_bytes;
  const size_t stays = held.allocated_bytes - std::min(held.allocated_bytes, goes);
  text << "torch_lms: expected room " << (op != nullptr ? std::string("in ") + op + " " : "")
       << "for a " << (device.device().is_cpu() ? "CPU" : "CUDA") << " tensor of " << nbytes
       << " bytes within the limit of " << held.limit_bytes << " bytes, found "
       << held.allocated_bytes << " bytes in use of which nothing more can be paged out (inputs of "
       << "running ops: " << held.in_use_bytes << ", pinned by the program, a captured graph or a "
       << "collective: " << held.fixed_bytes << ", on their way: " << held.leaving_bytes
       << ", not seen in any op: " << held.unseen_bytes
       << ", small, in private pools, or inside of "
       << "compiled code: " << held.other_bytes << ", free to go: " << held.movable_bytes
       << "): " << text_of(why) << ". Raise the limit, lower "
       << "min_bytes, or use smaller batches; a limit of " << with_small_ones(stays + nbytes)
       << " bytes would do here. ";
  return text.str();
}

} // namespace torch_lms
