#include <extension/access/Frame.h>

#include <utility>

#include <extension/base/Fork.h>

namespace torch_lms {

/// For a thread that has none, until it ends.
Frame& make_frame(Frame** place) {
  struct Cleaner {
    Frame** place;
    ~Cleaner() {
      Frame* frame = std::exchange(*place, nullptr);
      if (frame != nullptr && !in_forked_child()) { // The locks that it takes belong to the parent.
        frame->take_back_all();
        delete frame;
      }
    }
  };
  *place = new Frame(); // too large for a thread's own block
  static thread_local Cleaner cleaner{place}; // ops of later destructors leave their frame behind
  static_cast<void>(&cleaner);
  return **place;
}

} // namespace torch_lms
