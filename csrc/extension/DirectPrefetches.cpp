#include <extension/DirectPrefetches.h>

#include <algorithm>
#include <utility>

#include <ATen/record_function.h>

namespace torch_lms {
namespace {

thread_local bool for_prefetch = false;
thread_local size_t contiguous_reserve = 0;

constexpr size_t kSweepAt = 256;

} // namespace

PrefetchAllocations::PrefetchAllocations(size_t contiguous_reserve_bytes) noexcept {
  for_prefetch = true;
  contiguous_reserve = contiguous_reserve_bytes;
}

PrefetchAllocations::~PrefetchAllocations() {
  for_prefetch = false;
  contiguous_reserve = 0;
}

void allocate_for_prefetches() noexcept {
  for_prefetch = true;
}

bool allocates_for_prefetch() noexcept {
  return for_prefetch;
}

size_t contiguous_reserve_bytes() noexcept {
  return contiguous_reserve;
}

bool DirectPrefetches::begin(const EntityPtr& entity, size_t contiguous_reserve_bytes) {
  if (!entity->request_pagein()) {
    return false;
  }
  RECORD_USER_SCOPE("torch_lms::prefetch");
  FinishedTransfer transfer;
  transfer.entity = entity;
  {
    const PrefetchAllocations scope(contiguous_reserve_bytes);
    transfer.in = entity->begin_pagein();
  }
  if (transfer.in == nullptr) {
    return false;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (begun_.size() >= kSweepAt) {
    begun_.erase(
        std::remove_if(
            begun_.begin(),
            begun_.end(),
            [](const FinishedTransfer& t) { return t.entity->state() != EntityState::kPagingIn; }),
        begun_.end());
  }
  begun_.push_back(std::move(transfer));
  return true;
}

EntityPtr DirectPrefetches::cancel_last() {
  for (;;) {
    FinishedTransfer last;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (begun_.empty()) {
        return nullptr;
      }
      last = std::move(begun_.back());
      begun_.pop_back();
    }
    if (last.entity->cancel_arrival(last.in) != nullptr) {
      return last.entity;
    }
  }
}

std::vector<FinishedTransfer> DirectPrefetches::take_all() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<FinishedTransfer> all;
  all.swap(begun_);
  return all;
}

} // namespace torch_lms
