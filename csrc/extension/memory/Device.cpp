#include <extension/memory/Device.h>

#include <chrono>

#include <extension/base/ThreadContext.h>

namespace torch_lms {
namespace {

class ClockMark final : public TimeMark {
 public:
  double us_since(const TimeMark& earlier) const override {
    const auto passed = at_ - static_cast<const ClockMark&>(earlier).at_;
    return std::chrono::duration<double, std::micro>(passed).count();
  }

 private:
  const std::chrono::steady_clock::time_point at_ = std::chrono::steady_clock::now();
};

} // namespace

std::shared_ptr<TimeMark> Device::mark_time() {
  return std::make_shared<ClockMark>();
}

c10::DataPtr Device::allocate_placeholder(size_t nbytes) {
  const PrefetchAllocations scope(/*contiguous_reserve_bytes=*/0);
  return allocate(nbytes, current_stream());
}

} // namespace torch_lms
