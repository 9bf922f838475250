#include <extension/CountingCpuAllocator.h>

#include <sys/mman.h>

#include <new>

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <entity/Error.h>

#include <extension/Device.h>
#include <extension/DirectPrefetches.h>
#include <extension/Fork.h>
#include <extension/MemoryPressure.h>

namespace torch_lms {
namespace {

constexpr size_t kMappedFromBytes = size_t{1} << 20;
// alloc_cpu aligns to 64 bytes; a header of that size keeps the data aligned.
constexpr size_t kHeaderBytes = 64;

} // namespace

struct CountingCpuAllocator::Header {
  size_t nbytes; // header included
  bool mapped;
};

CountingCpuAllocator& CountingCpuAllocator::get() {
  static auto* allocator = new CountingCpuAllocator();
  return *allocator;
}

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

/// Counts `nbytes` if the limit leaves room for them: two threads never take the same
/// room.
bool CountingCpuAllocator::reserve(size_t nbytes) noexcept {
  const size_t limit = in_forked_child() ? 0 : limit_bytes_.load(std::memory_order_relaxed);
  size_t before = allocated_bytes_.load(std::memory_order_relaxed);
  do {
    if (limit != 0 && before + nbytes > limit) {
      return false;
    }
  } while (
      !allocated_bytes_.compare_exchange_weak(before, before + nbytes, std::memory_order_relaxed));
  const size_t now = before + nbytes;
  size_t peak = peak_bytes_.load(std::memory_order_relaxed);
  while (now > peak && !peak_bytes_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
  return true;
}

void CountingCpuAllocator::reserve_or_throw(size_t nbytes) {
  if (allocates_for_prefetch()) {
    if (!reserve(nbytes)) {
      throw NoRoom("expected room for a prefetch, found none; it stays on disk");
    }
    return;
  }
  Device& device = *find_device(c10::Device(c10::kCPU));
  MemoryPressure& pressure = MemoryPressure::get();
  while (limit_bytes_.load(std::memory_order_relaxed) != 0 && !in_forked_child()) {
    const bool room = pressure.make_room(device, nbytes);
    if (reserve(nbytes)) {
      return;
    }
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        room, // Another thread was faster: again.
        "torch_lms: expected room for a CPU tensor of ",
        nbytes,
        " bytes within the limit of ",
        pressure.limit_bytes(device),
        " bytes, found ",
        allocated_bytes(),
        " bytes in use of which nothing more can be paged out (inputs of running ops, small or "
        "pinned storages, memory that is not PyTorch's). Raise the limit, lower min_bytes, or "
        "use smaller batches. ",
        pressure.last_error());
  }
  reserve(nbytes);
}

void* CountingCpuAllocator::allocate_block(size_t total_bytes) {
  static_assert(sizeof(Header) <= kHeaderBytes, "the header must fit in front of the data");
  const bool mapped = total_bytes >= kMappedFromBytes && !in_forked_child();
  void* block = mapped ? blocks_.allocate(total_bytes) : c10::alloc_cpu(total_bytes);
  new (block) Header{total_bytes, mapped};
  return static_cast<char*>(block) + kHeaderBytes;
}

c10::DataPtr CountingCpuAllocator::allocate(size_t nbytes) {
  const c10::Device cpu(c10::kCPU);
  if (nbytes == 0) {
    return {nullptr, nullptr, &free_block, cpu};
  }
  const size_t total_bytes = nbytes + kHeaderBytes;
  reserve_or_throw(total_bytes);
  try {
    void* data = allocate_block(total_bytes);
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
  CountingCpuAllocator& self = get();
  self.allocated_bytes_.fetch_sub(header.nbytes, std::memory_order_relaxed);
  if (!header.mapped) {
    c10::free_cpu(block);
  } else if (in_forked_child()) {
    munmap(block, header.nbytes); // the cache's lock may be held by a parent's thread
  } else {
    self.blocks_.free(block, header.nbytes);
  }
}

c10::DeleterFnPtr CountingCpuAllocator::raw_deleter() const {
  return &free_block;
}

void CountingCpuAllocator::copy_data(void* to, const void* from, size_t nbytes) const {
  default_copy_data(to, from, nbytes);
}

} // namespace torch_lms
