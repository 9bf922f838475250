#include <c10/core/StoragePager.h>

#include <c10/core/StorageImpl.h>

namespace c10 {

StoragePager::~StoragePager() = default;

StoragePagerSlot& StoragePagerSlot::operator=(StoragePagerSlot&& other) noexcept {
  if (this != &other) {
    StoragePager* pager = other.release();
    delete pager_.exchange(pager, std::memory_order_acq_rel);
  }
  return *this;
}

StoragePager* StoragePagerSlot::install(std::unique_ptr<StoragePager> pager) noexcept {
  StoragePager* present = nullptr;
  if (pager_.compare_exchange_strong(present, pager.get(), std::memory_order_acq_rel)) {
    return pager.release();
  }
  return present;
}

void StoragePagerSlot::drop_slow() noexcept {
  delete release();
}

void StorageImpl::pagein_slow() const {
  StoragePager* pager = pager_.get();
  if (pager != nullptr && !pager->resident()) {
    pager->pagein(data_ptr_);
  }
}

} // namespace c10
