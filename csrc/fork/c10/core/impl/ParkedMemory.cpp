#include <c10/core/impl/ParkedMemory.h>

#include <utility>

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

std::unique_ptr<torch_lms::DeviceBlock> ParkedMemory::install_host(
    void*,
    const std::shared_ptr<torch_lms::EntityStorageImpl>&) {
  // Nothing points at the host copy but the entity: accesses find the pager first.
  return std::make_unique<ParkedBlock>(take());
}

std::unique_ptr<torch_lms::DeviceBlock> ParkedMemory::allocate(size_t nbytes) {
  return std::make_unique<ParkedBlock>(device_.allocate(nbytes, home_stream_));
}

void ParkedMemory::install_device(std::unique_ptr<torch_lms::DeviceBlock>& block) {
  data_ = static_cast<ParkedBlock&>(*block).take();
}

} // namespace impl
} // namespace c10
