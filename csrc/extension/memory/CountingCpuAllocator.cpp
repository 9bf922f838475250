#include <extension/memory/CountingCpuAllocator.h>

#include <sys/mman.h>

#include <new>

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <entity/Error.h>

#include <extension/base/Fork.h>
#include <extension/base/ThreadContext.h>
#include <extension/memory/Device.h>
#include <extension/memory/Room.h>

namespace torch_lms {
namespace {

constexpr size_t kMappedFromBytes = size_t{1} << 20;
// alloc_cpu aligns to 64 bytes; a header of that size keeps the data aligned.
constexpr size_t kHeaderBytes = 64;
// Other threads may be faster each time; nobody is so often.
constexpr int kTries = 1000;

} // namespace

struct CountingCpuAllocator::Header {
  size_t nbytes; // header included
  CountingCpuAllocator* owner;
  bool mapped;
};

void CountingCpuAllocator::install() {
  c10::Allocator* current = c10::GetCPUAllocator();
  if (current != this) {
    before_ = current;
    c10::SetCPUAllocator(this, 255);
  }
}

void CountingCpuAllocator::uninstall() {
  if (before_ != nullptr && c10::GetCPUAllocator() == this) {
    c10::SetCPUAllocator(before_, 255);
  }
  blocks_.drop_cache();
}

/// Counts `nbytes` if the limit (0: none) leaves room for them: two threads never take the same
/// room.
bool CountingCpuAllocator::reserve(size_t nbytes, size_t limit_bytes) noexcept {
  size_t before = allocated_bytes_.load(std::memory_order_relaxed);
  do {
    if (limit_bytes != 0 && before + nbytes > limit_bytes) {
      return false;
    }
  } while (
      !allocated_bytes_.compare_exchange_weak(before, before + nbytes, std::memory_order_relaxed));
  return true;
}

/// To be called once there is a block for what was reserved: what was refused is in no peak.
void CountingCpuAllocator::note_peak() noexcept {
  const size_t now = allocated_bytes_.load(std::memory_order_relaxed);
  size_t peak = peak_bytes_.load(std::memory_order_relaxed);
  while (now > peak && !peak_bytes_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
}

void CountingCpuAllocator::reserve_within_limit(Room& room, size_t nbytes) {
  if (this_thread().for_prefetch) {
    if (!reserve(nbytes, device_.limit_bytes())) {
      throw NoRoom("expected room for a prefetch, found none; it stays on disk");
    }
    return;
  }
  Room::Answer answer = Room::Answer::kFits;
  for (int tries = 0; tries < kTries && answer == Room::Answer::kFits; ++tries) {
    // Prefetches take room and spend no budget, so what is left of one may be worth nothing.
    const bool granted = tries == 0 && device_.spend(nbytes);
    answer = granted ? Room::Answer::kFits : room.make_room(device_, nbytes);
    if (reserve(nbytes, answer == Room::Answer::kGiveWay ? 0 : device_.limit_bytes())) {
      return;
    }
  } // While there was room, another thread was faster.
  TORCH_CHECK_WITH(OutOfMemoryError, false, room.explain(device_, nbytes));
}

void* CountingCpuAllocator::allocate_block(size_t total_bytes) {
  static_assert(sizeof(Header) <= kHeaderBytes, "the header must fit in front of the data");
  bool mapped = total_bytes >= kMappedFromBytes && !in_forked_child();
  void* block = nullptr;
  try {
    block = mapped ? blocks_.allocate(total_bytes) : nullptr;
  } catch (const std::bad_alloc&) { // PyTorch's own function says how much was asked for
  }
  mapped = block != nullptr;
  if (!mapped) {
    block = c10::alloc_cpu(total_bytes);
  }
  new (block) Header{total_bytes, this, mapped};
  return static_cast<char*>(block) + kHeaderBytes;
}

c10::DataPtr CountingCpuAllocator::allocate(size_t nbytes) {
  const c10::Device cpu(c10::kCPU);
  if (nbytes == 0) {
    return {nullptr, nullptr, &free_block, cpu};
  }
  const size_t total_bytes = nbytes + kHeaderBytes;
  Room* room = in_forked_child() ? nullptr : room_.load(std::memory_order_relaxed);
  if (room != nullptr && device_.limit_bytes() != 0) {
    reserve_within_limit(*room, total_bytes);
  } else {
    reserve(total_bytes, 0);
  }
  try {
    void* data = allocate_block(total_bytes);
    note_peak();
    return {data, data, &free_block, cpu};
  } catch (...) {
    allocated_bytes_.fetch_sub(total_bytes, std::memory_order_relaxed);
    throw;
  }
}

void CountingCpuAllocator::free_block(void* data) {
  if (data == nullptr) {
    return;
  }
  void* block = static_cast<char*>(data) - kHeaderBytes;
  const Header header = *static_cast<Header*>(block);
  header.owner->allocated_bytes_.fetch_sub(header.nbytes, std::memory_order_relaxed);
  if (!header.mapped) {
    c10::free_cpu(block);
  } else if (in_forked_child()) {
    munmap(block, header.nbytes); // the cache's lock may be held by a parent's thread
  } else {
    header.owner->blocks_.free(block, header.nbytes);
  }
}

c10::DeleterFnPtr CountingCpuAllocator::raw_deleter() const {
  return &free_block;
}

void CountingCpuAllocator::copy_data(void* to, const void* from, size_t nbytes) const {
  default_copy_data(to, from, nbytes);
}

} // namespace torch_lms
