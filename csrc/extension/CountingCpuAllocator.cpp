#include <extension/CountingCpuAllocator.h>

#include <sys/mman.h>

#include <new>

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <extension/Device.h>
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

void CountingCpuAllocator::count(size_t nbytes) noexcept {
  const size_t now = allocated_bytes_.fetch_add(nbytes, std::memory_order_relaxed) + nbytes;
  size_t peak = peak_bytes_.load(std::memory_order_relaxed);
  while (now > peak && !peak_bytes_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
}

void* CountingCpuAllocator::allocate_block(size_t nbytes) {
  static_assert(sizeof(Header) <= kHeaderBytes, "the header must fit in front of the data");
  const size_t total = nbytes + kHeaderBytes;
  const bool mapped = total >= kMappedFromBytes && !in_forked_child();
  void* block = mapped ? blocks_.allocate(total) : c10::alloc_cpu(total);
  new (block) Header{total, mapped};
  count(total);
  return static_cast<char*>(block) + kHeaderBytes;
}

c10::DataPtr CountingCpuAllocator::allocate(size_t nbytes) {
  const c10::Device cpu(c10::kCPU);
  if (nbytes == 0) {
    return {nullptr, nullptr, &free_block, cpu};
  }
  if (limited_.load(std::memory_order_relaxed) && !in_forked_child()) {
    Device& device = *find_device(cpu);
    MemoryPressure& pressure = MemoryPressure::get();
    if (!pressure.make_room(device, nbytes)) {
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          false,
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
  }
  void* data = allocate_block(nbytes);
  return {data, data, &free_block, cpu};
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
