#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

namespace torch_lms {

/// Note [Cycles]
/// What a plan covers is what a program repeats: a step. Two things tell where one ends.
///
/// A program that trains is cut where its backwards end. The pieces are segments, and a segment is
/// known by the names of its ops, in the order in which each thread runs its own: how threads mix
/// is by chance, but two models that take turns may run the same ops, in another order. Most
/// programs repeat one segment. One that accumulates gradients, takes turns between two models, or
/// runs backward twice in a step repeats several; the cycle is then all of these. It begins where
/// the least memory is held: elsewhere what one backward leaves for the next would be cut in two.
/// Where that is the same everywhere it begins with the rarest, which most often has the optimizer
/// in it.
///
/// One op that is another by chance (autograd adds in place only what nobody else holds just then)
/// makes another segment of the one that it is in. So where a cycle of several has held on, a
/// segment that is unlike what was due is taken for it, unless what comes is periodic as it is: one
/// for each time that the cycle has come in order, of the last few. The cycle goes on, and not each
/// of its segments is a cycle until it has come twice again.
///
/// Where no backward ends for long (inference), the names themselves are looked through for the
/// shortest sequence that has come twice in a row, and holds on: the layers of a model repeat, too,
/// but do not go on. What comes after fewer ops than are worth the end of a cycle is one cycle
/// together with as many more.

/// Finds where the cycles of a program end, from the names of its outermost ops.
///
/// Not thread-safe.
class CycleFinder {
 public:
  /// An op of `name` has run on `thread`. Returns whether a cycle of a program without backwards
  /// has ended.
  bool note_op(uint64_t name, uint64_t thread);

  /// A backward has ended, and `held_bytes` are still in use. Returns whether a cycle has ended,
  /// too.
  bool end_segment(size_t held_bytes);

  /// Segments in a cycle; 0 while there is none, or no backward.
  size_t segments() const noexcept {
    return period_;
  }

  /// Whether what comes next may be found to repeat what came last. The first segment begins where
  /// the program happens to be, most often behind what follows a backward in each step.
  bool may_repeat() const noexcept {
    return segments_.size() != 1;
  }

  /// Whether such a cycle has come twice in a row, or no order is to be expected any more.
  bool certain() const noexcept {
    return certain_;
  }

 private:
  static constexpr size_t kMostSegments = 16; // in a cycle
  static constexpr size_t kMostUncertain = 8; // segments, before no order is expected
  static constexpr size_t kMostTaken = 4; // segments, for what was due
  static constexpr size_t kFewestNames = 256;
  static constexpr size_t kFewestInCycle = 64; // names
  static constexpr size_t kNamesToHold = 4096;
  static constexpr size_t kMostNames = size_t{1} << 16;

  struct Segment {
    uint64_t names;
    uint64_t taken_for; // the names that were due; mostly its own
    size_t held_bytes;
  };

  uint64_t& order_of(uint64_t thread);
  uint64_t names_in_segment() const noexcept;
  Segment segment_that_ended(size_t held_bytes);
  size_t find_period(uint64_t Segment::* names) const;
  size_t until_end(size_t period) const;
  bool note_name(uint64_t name);
  bool holds_on();
  bool look_for_repetition(uint64_t name);
  void repeat(size_t length);
  void look_anew(size_t room);

  // Segments.
  std::deque<Segment> segments_; // the latest
  size_t period_ = 0;
  size_t left_ = 0; // segments until the cycle ends
  size_t in_order_ = 0; // segments, less a period for each that was taken for what was due
  bool certain_ = false;
  std::vector<std::pair<uint64_t, uint64_t>> orders_; // of names in the segment, for each thread
  size_t ops_in_segment_ = 0;
  size_t ops_in_last_segment_ = 0;
  bool repeats_ = false; // something within the present segment

  // Repetitions: the Knuth-Morris-Pratt failure function of all names since `look_anew`.
  std::vector<uint64_t> names_;
  std::vector<size_t> borders_;
  size_t room_ = kFewestNames;
  size_t repetition_ = 0; // its length; 0 while none is found
  size_t at_ = 0; // in it
  size_t held_ = 0; // names that it covers
  bool holds_ = false; // it is a cycle
  size_t too_short_ = 0; // a repetition that did not hold on went as far
};

} // namespace torch_lms
