#include <extension/transfer/PageoutBatch.h>

#include <algorithm>
#include <utility>

#include <ATen/record_function.h>

namespace torch_lms {
namespace {

// So many that a shared fence pays, so few that the first copy begins soon.
constexpr size_t kMostRequests = 32;

} // namespace

PageoutBatch::PageoutBatch(CudaEntityTransferQueue& out_queue, bool by_hand)
    : out_queue_(out_queue), by_hand_(by_hand) {}

PageoutBatch::~PageoutBatch() {
  abandon();
}

void PageoutBatch::abandon() noexcept {
  for (const Request& request : requests_) {
    request.entity->abandon_request();
  }
  requests_.clear();
}

bool PageoutBatch::add(const EntityPtr& entity) {
  entity->device().note_current_stream();
  requests_.reserve(requests_.empty() ? 8 : kMostRequests); // a begun request must not be lost
  auto transfer = entity->begin_request();
  if (transfer == nullptr) {
    return false;
  }
  requests_.push_back(Request{entity, std::move(transfer)});
  if (requests_.size() == kMostRequests) {
    submit();
  }
  return true;
}

/// One for each device, unless ops of other threads may use the bytes without having pinned
/// them: see Note [Who may still use a storage].
void PageoutBatch::take_fences() {
  const uint64_t known_since = by_hand_ ? OpClock::get().tick() : 0;
  std::vector<std::pair<const Device*, FencePtr>> fences;
  for (const Request& request : requests_) {
    PageoutTransfer& transfer = *request.transfer;
    transfer.earlier.tick = std::max(transfer.earlier.tick, known_since);
    transfer.doubtful = transfer.earlier.running();
    if (!transfer.doubtful) {
      Device& device = request.entity->device();
      auto fence = std::find_if(
          fences.begin(), fences.end(), [&](const auto& known) { return known.first == &device; });
      if (fence == fences.end()) {
        fence = fences.insert(fence, {&device, device.backend()->submitted_work()});
      }
      transfer.after = fence->second;
    }
  }
}

void PageoutBatch::submit() {
  if (requests_.empty()) {
    return;
  }
  take_fences();
  std::vector<std::shared_ptr<EntityStorageImpl>> going;
  size_t nbytes = 0;
  size_t count = 0;
  going.reserve(requests_.size());
  std::vector<Request> finished; // frees on this thread
  try {
    for (const Request& request : requests_) {
      RECORD_USER_SCOPE("torch_lms::pageout");
      if (request.entity->finish_request(request.transfer)) {
        going.push_back(request.entity);
        nbytes += request.entity->nbytes();
      }
    }
    finished.swap(requests_);
    count = going.size();
    out_queue_.enqueue_all(going);
  } catch (...) { // Somebody is waiting for the queue, say.
    for (const auto& entity : going) {
      AccessResult ignored = AccessResult::kResident;
      entity->touch(&ignored);
    }
    throw;
  }
  bytes_ += nbytes;
  count_ += count;
}

} // namespace torch_lms
