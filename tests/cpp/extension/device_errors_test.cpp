// What fails on a device or its host, and who is to know of it: the fake device fails on demand.

#include <new>

#include <c10/util/Exception.h>
#include <entity/Error.h>

#include "rig.h"

namespace torch_lms {
namespace {

AsyncBackend& backend() {
  return *fake_device("the CPU's copies do not fail").async;
}

template <class Exception, class... Arguments>
std::function<void()> throwing(Arguments... arguments) {
  return [=] { throw Exception(arguments...); };
}

/// Automatic mode, in which a page-out has failed with what `fail` throws: nobody knows of it yet.
struct FailedPageout {
  explicit FailedPageout(std::function<void()> fail) : tensor(tensor_of(3)) {
    Device& device = Program::get().device();
    backend().when_host_asked = std::move(fail);
    lms().policy.enable(device, device.use().allocated_bytes + (1 << 20), 4096);
    page_out({tensor});
    CudaEntityTransferQueue& queue = lms().pager.out_queue();
    for (const uint64_t last = queue.pending_until(); !queue.is_over(last);) {
      queue.wait_for_progress(queue.progress(), 1000);
    }
    lms().pager.commit_finished();
    backend().when_host_asked = nullptr;
    CHECK_EQ(state(tensor), "resident");
  }

  const Settled settled;
  const at::Tensor tensor;
};

void before_capture() {
  Program::get().async->allocator.room.load()->before_capture();
}

TEST(a_use_of_what_no_stream_can_be_ordered_after_throws) {
  backend();
  const Settled settled;
  const at::Tensor tensor = tensor_of(3);
  REQUIRE(go_out(tensor));
  const EntityPtr entity = lms().pager.find(*tensor.storage().unsafeGetStorageImpl());
  {
    const HeldCopies held;
    backend().instead_of_order = [] {};
    entity->pin();
    CHECK(lms().pager.use(entity) == Place::kDevice);
    backend().instead_of_order = throwing<TransferFailed>("the device is in error");
    CHECK_THROWS(lms().pager.use(entity), TransferFailed, "in error");
    backend().instead_of_order = throwing<std::bad_alloc>();
    CHECK_THROWS(lms().pager.use(entity), std::bad_alloc, "");
    entity->unpin();
    backend().instead_of_order = nullptr;
  }
  CHECK(holds(tensor, 3));
}

TEST(a_capture_does_not_mind_that_the_host_was_full) {
  const FailedPageout failed(throwing<HostPoolFull>("the host is full"));
  before_capture();
  CHECK(holds(failed.tensor, 3));
}

TEST(a_capture_does_not_mind_that_there_was_no_memory_for_a_page_out) {
  const FailedPageout failed(throwing<std::bad_alloc>());
  before_capture();
  CHECK(holds(failed.tensor, 3));
}

TEST(a_capture_is_told_that_the_device_is_in_error) {
  const FailedPageout failed(throwing<TransferFailed>("the device is in error"));
  CHECK_THROWS(before_capture(), TransferFailed, "in error");
}

TEST(automatic_mode_ends_whatever_a_page_out_failed_for) {
  for (const auto& fail :
       {throwing<HostPoolFull>("the host is full"),
        throwing<std::bad_alloc>(),
        throwing<TransferFailed>("the device is in error")}) {
    const FailedPageout failed(fail);
    lms().disable();
    CHECK(!lms().policy.wakefulness().enabled());
    CHECK(holds(failed.tensor, 3));
  }
}

TEST(automatic_mode_ends_before_it_tells_of_what_it_does_not_know) {
  const FailedPageout failed([] { TORCH_CHECK(false, "PyTorch's own"); });
  CHECK_THROWS(lms().disable(), c10::Error, "PyTorch's own");
  CHECK(!lms().policy.wakefulness().enabled());
  CHECK(holds(failed.tensor, 3));
}

} // namespace
} // namespace torch_lms
