// After which op the recorder says that a storage was released.

#include <algorithm>
#include <random>

#include <ATen/ops/empty.h>
#include <extension/access/Recorder.h>

#include "made.h"

namespace torch_lms {
namespace {

/// A recorded program, and what a look at every storage after every op finds.
class Recorded {
 public:
  Recorded() {
    recorder.begin(Program::get().device(), [] { return size_t{0}; });
  }

  /// An op that uses these.
  void op(const std::vector<EntityPtr>& used) {
    look();
    Frame frame;
    for (const EntityPtr& entity : used) {
      if (std::find(entities_.begin(), entities_.end(), entity) == entities_.end()) {
        entities_.push_back(entity);
        released_.push_back(-1);
      }
      frame.pinned.push_back(entity.get());
    }
    const at::RecordFunction record(at::RecordScope::FUNCTION);
    recorder.begin_op(record, frame);
    recorder.end_op(record, frame, /*backward=*/true);
    frame.pinned.clear(); // nothing has been pinned
    ++ops_;
  }

  /// Returns how many have been released.
  size_t end() {
    look();
    const auto cycle = recorder.end();
    REQUIRE(cycle != nullptr);
    REQUIRE(cycle->storages.size() == released_.size());
    for (size_t i = 0; i < released_.size(); ++i) {
      CHECK_EQ(cycle->storages[i].released, released_[i]);
    }
    return released_.size() -
           static_cast<size_t>(std::count(released_.begin(), released_.end(), -1));
  }

 private:
  void look() {
    for (size_t i = 0; i < entities_.size(); ++i) {
      if (released_[i] == -1 && (entities_[i]->is_leaving() || entities_[i]->gone())) {
        released_[i] = ops_ - 1;
      }
    }
  }

  Audition audition_;

 public:
  Recorder recorder{lms().pager, lms().recipes, audition_};

 private:
  std::vector<EntityPtr> entities_; // by number
  std::vector<int32_t> released_;
  int32_t ops_ = 0;
};

/// Storages come, move, change their memory, and go.
class RandomProgram {
 public:
  explicit RandomProgram(uint64_t seed) : random_(seed) {}

  void step(Recorded& recorded) {
    if (tensors_.size() < 8 || below(3) == 0) {
      tensors_.push_back(tensor_of(static_cast<int64_t>(below(100)), 1024));
    }
    at::Tensor& tensor = tensors_[below(tensors_.size())];
    switch (below(8)) {
      case 0:
        page_out({tensor});
        break;
      case 1:
        go_out(tensor);
        break;
      case 2:
        prefetch(tensor);
        break;
      case 3: // it is given other memory
        if (state(tensor) == "paged_out" || state(tensor) == "resident") {
          tensor.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
              c10::GetCPUAllocator()->allocate(tensor.nbytes()));
          tensor.zero_();
        }
        break;
      case 4:
        page_out({tensor});
        std::swap(tensor, tensors_.back());
        tensors_.pop_back();
        break;
      case 5:
      case 6:
        std::swap(tensor, tensors_.back());
        tensors_.pop_back();
        break;
      default:
        break;
    }
    std::vector<EntityPtr> used;
    for (size_t i = 0; i < 3 && !tensors_.empty(); ++i) {
      used.push_back(tracked(tensors_[below(tensors_.size())]));
    }
    recorded.op(used);
  }

 private:
  size_t below(size_t count) {
    return random_() % count;
  }

  std::mt19937_64 random_;
  std::vector<at::Tensor> tensors_;
};

/// See Note [What the program has let go of]
TEST(storages_are_released_after_the_op_after_which_the_program_let_go_of_them) {
  const Observed observed;
  size_t released = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    RandomProgram program(seed);
    Recorded recorded;
    for (int i = 0; i < 200; ++i) {
      program.step(recorded);
    }
    released += recorded.end();
    lms().manual.wait_pageouts();
    lms().manual.wait_pageins();
  }
  CHECK(released > 500); // or nothing has been tested
}

TEST(storages_that_stay_are_not_looked_into) {
  const Observed observed;
  Recorded recorded;
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 300; ++i) {
    tensors.push_back(at::empty({64}, at::kFloat));
    recorded.op({tracked(tensors.back())});
  }
  for (int i = 0; i < 300; ++i) {
    recorded.op({tracked(tensors.front())});
    if (i % 30 == 0) {
      tensors.pop_back();
    }
  }
  CHECK_EQ(recorded.end(), 10);
  CHECK_EQ(recorded.recorder.looks(), 10);
}

} // namespace
} // namespace torch_lms
