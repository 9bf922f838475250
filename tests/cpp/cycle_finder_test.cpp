#include <extension/trace/CycleFinder.h>

#include <initializer_list>
#include <string>

#include "harness.h"

namespace torch_lms {
namespace {

constexpr uint64_t kThread = 1;

/// Runs segments, each of ops of its letter, and writes a bar where a cycle ends.
std::string run(
    CycleFinder& finder,
    const std::string& segments,
    int ops = 40,
    const std::string& holding_more = "") {
  std::string ended;
  for (const char letter : segments) {
    for (int i = 0; i < ops; ++i) {
      finder.note_op(static_cast<uint64_t>(letter) * 1000 + static_cast<uint64_t>(i), kThread);
    }
    ended += letter;
    ended +=
        finder.end_segment(holding_more.find(letter) == std::string::npos ? 100 : 200) ? "|" : "";
  }
  return ended;
}

std::string repeated(const std::string& text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) {
    all += text;
  }
  return all;
}

/// Runs a forward of `layers`; returns after how many ops cycles ended.
std::vector<int> forward(CycleFinder& finder, int layers) {
  std::vector<int> ends;
  int ops = 0;
  const auto op = [&](uint64_t name) {
    ++ops;
    if (finder.note_op(name, kThread)) {
      ends.push_back(ops);
    }
  };
  op(1); // embedding
  op(2);
  for (int layer = 0; layer < layers; ++layer) {
    for (const uint64_t name : {3, 4, 5, 4, 6, 7}) {
      op(name);
    }
  }
  op(8); // head
  return ends;
}

TEST(a_segment_that_is_repeated_is_a_cycle) {
  CycleFinder finder;
  CHECK_EQ(run(finder, "AAAA"), "A|A|A|A|");
  CHECK_EQ(finder.segments(), 1);
}

TEST(segments_that_take_turns_are_one_cycle_that_begins_with_the_rarest) {
  CycleFinder finder;
  run(finder, repeated("ABBB", 3));
  CHECK_EQ(run(finder, "ABBBABBB"), "ABBB|ABBB|");
  CHECK_EQ(finder.segments(), 4);
}

TEST(two_models_in_turn_are_one_cycle) {
  CycleFinder finder;
  run(finder, "XGDGDGD"); // the first has no optimizer state yet
  const std::string ended = run(finder, "GDGDGD");
  CHECK(ended == "GD|GD|GD|" || ended == "G|DG|DG|D");
}

TEST(a_cycle_ends_where_the_least_is_held) {
  CycleFinder finder;
  run(finder, repeated("PQR", 3), 40, "PR");
  CHECK_EQ(run(finder, "PQRPQR", 40, "PR"), "PQ|RPQ|R");
  CHECK(finder.certain());
}

TEST(a_cycle_that_has_come_once_is_not_certain) {
  CycleFinder finder;
  run(finder, "AB");
  CHECK(!finder.certain());
  run(finder, "AB");
  CHECK(finder.certain());
}

TEST(what_the_first_segment_was_is_not_expected_to_come_again) {
  CycleFinder finder;
  CHECK(finder.may_repeat()); // as where there are no backwards
  run(finder, "A");
  CHECK(!finder.may_repeat());
  run(finder, "B");
  CHECK(finder.may_repeat());
}

TEST(a_cycle_that_changes_is_found_again) {
  CycleFinder finder;
  run(finder, repeated("ABB", 6));
  run(finder, repeated("CDE", 6));
  CHECK_EQ(finder.segments(), 3);
  run(finder, repeated("F", 20));
  CHECK_EQ(finder.segments(), 1);
}

TEST(a_segment_that_is_another_once_is_taken_for_what_was_due) {
  CycleFinder finder;
  run(finder, repeated("GD", 6), 40, "D");
  CHECK_EQ(run(finder, "GDGXGDGD", 40, "DX"), "G|DG|XG|DG|D");
  CHECK_EQ(run(finder, "YDGDGD", 40, "D"), "Y|DG|DG|D");
  CHECK_EQ(finder.segments(), 2);
}

TEST(segments_that_are_others_now_and_then_end_no_cycle_that_has_held_on) {
  CycleFinder finder;
  run(finder, repeated("GD", 10), 40, "D");
  CHECK_EQ(run(finder, "XYGDZDGVGD", 40, "DYV"), "X|YG|DZ|DG|VG|D");
  CHECK_EQ(finder.segments(), 2);
  run(finder, "ABCEFHIJ");
  CHECK_EQ(finder.segments(), 1);
}

TEST(a_segment_that_is_another_again_and_again_makes_another_cycle) {
  CycleFinder finder;
  run(finder, repeated("GD", 6), 40, "DX");
  CHECK_EQ(run(finder, "GXGXGX", 40, "DX"), "G|XG|XG|X");
  run(finder, repeated("GXGXGD", 6), 40, "DX");
  CHECK_EQ(finder.segments(), 6);
  run(finder, repeated("H", 2), 40, "DX");
  CHECK_EQ(finder.segments(), 1);
}

TEST(segments_without_an_order_are_cycles_each) {
  CycleFinder finder;
  CHECK_EQ(run(finder, "ABCDEFGH"), "A|B|C|D|E|F|G|H|");
}

TEST(how_threads_mix_within_a_segment_does_not_matter) {
  CycleFinder finder;
  for (int cycle = 0; cycle < 8; ++cycle) {
    for (uint64_t segment = 0; segment < 2; ++segment) {
      for (uint64_t i = 0; i < 8; ++i) {
        const uint64_t op = i ^ (cycle % 2); // of two threads: odd ones and even ones
        finder.note_op(100 * segment + op, kThread + op % 2);
      }
      finder.end_segment(100);
    }
  }
  CHECK_EQ(finder.segments(), 2);
}

TEST(the_same_ops_in_another_order_are_another_segment) {
  CycleFinder finder;
  std::string ended;
  for (int segment = 0; segment < 8; ++segment) {
    for (uint64_t i = 0; i < 8; ++i) {
      finder.note_op((i + 4 * static_cast<uint64_t>(segment % 2)) % 8, kThread);
    }
    ended += finder.end_segment(segment % 2 == 0 ? 200 : 100) ? '|' : '.';
  }
  CHECK_EQ(finder.segments(), 2);
  CHECK_EQ(ended.substr(4), ".|.|");
}

TEST(a_forward_that_is_repeated_without_backwards_is_a_cycle_and_its_layers_are_not) {
  CycleFinder finder;
  for (int i = 0; i < 30; ++i) {
    CHECK(forward(finder, 32).size() <= 1);
  }
  const std::vector<int> ends = forward(finder, 32);
  REQUIRE(ends.size() == 1);
  CHECK(forward(finder, 32) == ends);
}

TEST(a_forward_is_known_when_two_have_followed_the_loop_in_the_first) {
  CycleFinder finder;
  std::vector<int> found; // the cycles that end in each forward
  for (int i = 0; i < 6; ++i) {
    found.push_back(static_cast<int>(forward(finder, 300).size()));
  }
  CHECK(found == std::vector<int>({0, 0, 1, 1, 1, 1}));
}

TEST(another_forward_is_known_as_soon) {
  CycleFinder finder;
  for (int i = 0; i < 8; ++i) {
    forward(finder, 300);
  }
  std::vector<int> found;
  for (int i = 0; i < 6; ++i) {
    finder.note_op(9, kThread); // what follows a token
    found.push_back(static_cast<int>(forward(finder, 300).size()));
  }
  CHECK(
      found == std::vector<int>({0, 0, 0, 1, 1, 1}) ||
      found == std::vector<int>({0, 0, 1, 1, 1, 1}));
}

TEST(some_short_forwards_are_a_cycle_once_they_have_held_on) {
  CycleFinder finder;
  std::vector<int> ended; // forwards, of 9 ops each
  for (int i = 0; i < 1000; ++i) {
    for (const int op : forward(finder, 1)) {
      CHECK_EQ(op, 9);
      ended.push_back(i);
    }
  }
  REQUIRE(ended.size() > 50);
  CHECK(ended.front() > 400);
  for (size_t i = 1; i < ended.size(); ++i) {
    CHECK_EQ(ended[i] - ended[i - 1], 8);
  }
}

TEST(an_op_that_is_repeated_is_no_cycle_by_itself) {
  CycleFinder finder;
  int ended = 0;
  for (int i = 0; i < 64 * 100; ++i) {
    ended += finder.note_op(7, kThread) ? 1 : 0;
  }
  CHECK(ended > 30);
  CHECK(ended < 40); // from 4096 names on
}

TEST(a_program_that_becomes_another_is_found_again_without_backwards) {
  CycleFinder finder;
  for (int i = 0; i < 40; ++i) {
    forward(finder, 32);
  }
  for (int i = 0; i < 40; ++i) {
    forward(finder, 40);
  }
  CHECK_EQ(forward(finder, 40).size(), 1);
}

TEST(an_evaluation_between_segments_leaves_their_order_alone) {
  CycleFinder finder;
  run(finder, repeated("ABBB", 4), 10);
  for (int i = 0; i < 60; ++i) {
    forward(finder, 32);
  }
  CHECK_EQ(run(finder, "ABBBABBB", 10), "ABBB|ABBB|");
}

} // namespace
} // namespace torch_lms
