#include <c10/core/impl/ParkedMemory.h>

#include <utility>

#include <c10/core/impl/SwapCounters.h>

namespace c10 {
namespace impl {
namespace {

class ParkedBlock final : public torch_lms::DeviceBlock {
 public:
  explicit ParkedBlock(DataPtr data) : data_(std::move(data)) {}
  void* data() const noexcept override {
    return data_.get();
  }
  DataPtr take() {
    return std::move(data_);
  }

 private:
  DataPtr data_;
};

} // namespace

bool ParkedMemory::leave_host() noexcept {
  if (!on_host_.exchange(false, std::memory_order_acq_rel)) {
    return false;
  }
  SwapCounters& counters = swap_counters();
  count(counters.paged_out_storages, -1);
  count(counters.paged_out_bytes, -static_cast<int64_t>(nbytes_));
  return true;
}

std::unique_ptr<torch_lms::DeviceBlock> ParkedMemory::install_host(
    void*,
    const std::shared_ptr<torch_lms::EntityStorageImpl>&) {
  // Nothing points at the host copy but the entity: accesses find the pager first.
  auto block = std::make_unique<ParkedBlock>(take());
  on_host_.store(true, std::memory_order_release);
  SwapCounters& counters = swap_counters();
  count(counters.pageouts);
  count(counters.pageout_bytes, static_cast<int64_t>(nbytes_));
  count(counters.paged_out_storages);
  count(counters.paged_out_bytes, static_cast<int64_t>(nbytes_));
  return block;
}

std::unique_ptr<torch_lms::DeviceBlock> ParkedMemory::allocate(size_t nbytes) {
  try {
    return std::make_unique<ParkedBlock>(device_.allocate(nbytes, home_stream_));
  } catch (...) {
    count(swap_counters().pagein_failures);
    throw;
  }
}

void ParkedMemory::install_device(std::unique_ptr<torch_lms::DeviceBlock> block) {
  data_ = static_cast<ParkedBlock&>(*block).take();
  leave_host();
  SwapCounters& counters = swap_counters();
  count(counters.pageins);
  count(counters.pagein_bytes, static_cast<int64_t>(nbytes_));
  const bool passive = passive_.load(std::memory_order_relaxed);
  count(passive ? counters.passive_pageins : counters.prefetch_hits);
}

} // namespace impl
} // namespace c10
