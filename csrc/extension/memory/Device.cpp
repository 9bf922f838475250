#include <extension/memory/Device.h>

#include <chrono>

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

} // namespace torch_lms
