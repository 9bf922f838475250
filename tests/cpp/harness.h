#pragma once

// A test harness in one header. A test is a file of its own program:
//
//   #include "harness.h"
//   TEST(the_queue_is_first_in_first_out) {
//     CHECK_EQ(queue.pop(), 1);                       // expected on the right
//     CHECK_THROWS(queue.pop(), std::runtime_error, "empty");
//   }
//
// The program runs the tests whose names contain its argument (all without one) and
// prints a line for each. A failed check is reported with its place and the test goes
// on; a `REQUIRE` ends it. Checks may be made from any thread, and in a forked child
// by way of `passes_in_child`. A test that takes minutes is ended as a deadlock.

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace harness {

constexpr unsigned kMaxTestSeconds = 240;
constexpr int kNoSuchTest = 77; // the program's exit status

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline std::atomic<int>& failures() {
  static std::atomic<int> count{0};
  return count;
}

struct Registration {
  Registration(const char* name, void (*body)()) {
    tests().push_back(Test{name, body});
  }
};

/// Ends a test without a verdict: what it needs is not here.
struct Skipped : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Ends a test that has failed and been reported.
struct Ended {};

inline bool report(bool ok, const char* file, int line, const std::string& text) {
  if (!ok) {
    failures().fetch_add(1);
    std::fprintf(stderr, "\n  %s:%d: %s\n", file, line, text.c_str());
  }
  return ok;
}

template <class T>
const T& printable(const T& value, std::false_type) {
  return value;
}

/// An address is not shown as the text that may be there.
template <class T>
const void* printable(const T& value, std::true_type) {
  return value;
}

template <class T>
auto show(const T& value, int) -> decltype(std::declval<std::ostream&>() << value, std::string()) {
  std::ostringstream text;
  text << std::boolalpha << printable(value, std::is_pointer<T>{});
  return text.str();
}

template <class T>
std::enable_if_t<std::is_enum<T>::value, std::string> show(const T& value, long) {
  return std::to_string(static_cast<long long>(value));
}

template <class T>
std::enable_if_t<!std::is_enum<T>::value, std::string> show(const T&, long) {
  return "(a value that does not print)";
}

/// Two integers of different types are compared by value.
template <class Found, class Expected>
bool same_value(const Found& found, const Expected& expected, std::true_type) {
  using Common = std::common_type_t<Found, Expected>;
  return (found < Found{}) == (expected < Expected{}) &&
         static_cast<Common>(found) == static_cast<Common>(expected);
}

template <class Found, class Expected>
bool same_value(const Found& found, const Expected& expected, std::false_type) {
  return found == expected;
}

template <class T>
struct IsNumber
    : std::integral_constant<bool, std::is_integral<T>::value && !std::is_same<T, bool>::value> {};

template <class Found, class Expected>
bool check_equal(
    const Found& found,
    const Expected& expected,
    const char* expression,
    const char* file,
    int line) {
  using BothNumbers =
      std::integral_constant<bool, IsNumber<Found>::value && IsNumber<Expected>::value>;
  if (same_value(found, expected, BothNumbers{})) {
    return true;
  }
  const std::string text = ": expected " + show(expected, 0) + ", found " + show(found, 0);
  return report(false, file, line, expression + text);
}

template <class Type>
bool check_throws(
    const std::function<void()>& body,
    const std::string& part,
    const char* expression,
    const char* file,
    int line) {
  std::string found = "nothing";
  try {
    body();
  } catch (const Type& error) {
    if (std::string(error.what()).find(part) != std::string::npos) {
      return true;
    }
    found = std::string("the message '") + error.what() + "'";
  } catch (const std::exception& error) {
    found = std::string("another exception: ") + error.what();
  }
  return report(
      false,
      file,
      line,
      std::string(expression) + ": expected an exception with '" + part + "', found " + found);
}

/// Runs `body` in a forked child, which ends without running destructors.
inline pid_t start_child(const std::function<void()>& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child != 0) {
    return child;
  }
  failures() = 0;
  alarm(kMaxTestSeconds);
  try {
    body();
  } catch (const Skipped&) {
    _exit(1);
  } catch (const Ended&) {
  } catch (const std::exception& error) {
    report(false, "in the child", 0, error.what());
  }
  std::fflush(nullptr);
  _exit(failures() == 0 ? 0 : 1);
}

/// Waits for a child. Returns whether its checks passed and nothing killed it.
inline bool child_passed(pid_t child) {
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) {
      return false;
    }
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

inline bool passes_in_child(const std::function<void()>& body) {
  return child_passed(start_child(body));
}

/// Returns whether the test passed; prints the rest of its line.
inline bool run(const Test& test) {
  const auto start = std::chrono::steady_clock::now();
  const int before = failures();
  std::string verdict = "ok";
  try {
    test.body();
  } catch (const Skipped& skipped) {
    verdict = std::string("skipped: ") + skipped.what();
  } catch (const Ended&) {
  } catch (const std::exception& error) {
    report(false, test.name, 0, std::string("unexpected exception: ") + error.what());
  }
  const bool passed = failures() == before;
  const auto took_ms = std::chrono::duration_cast<std::chrono::milliseconds>(
                           std::chrono::steady_clock::now() - start)
                           .count();
  std::printf(
      "%s (%lld ms)\n", passed ? verdict.c_str() : "FAILED", static_cast<long long>(took_ms));
  std::fflush(stdout);
  return passed;
}

inline int run_all(const char* wanted) {
  int failed = 0;
  int ran = 0;
  for (const Test& test : tests()) {
    if (std::strstr(test.name, wanted) == nullptr) {
      continue;
    }
    std::printf("%s ... ", test.name);
    std::fflush(stdout);
    alarm(kMaxTestSeconds);
    failed += run(test) ? 0 : 1;
    ++ran;
  }
  return failed != 0 ? 1 : ran == 0 ? kNoSuchTest : 0;
}

} // namespace harness

#define TEST(name)                                                             \
  static void test_##name();                                                   \
  static const harness::Registration registration_##name(#name, &test_##name); \
  static void test_##name()

#define CHECK(condition) \
  harness::report(static_cast<bool>(condition), __FILE__, __LINE__, "expected " #condition)

#define CHECK_EQ(found, expected) \
  harness::check_equal((found), (expected), #found, __FILE__, __LINE__)

/// The statement throws `Type` with `part` in its message.
#define CHECK_THROWS(statement, Type, part) \
  harness::check_throws<Type>(              \
      [&] { static_cast<void>(statement); }, (part), #statement, __FILE__, __LINE__)

/// As CHECK, and ends the test if it fails. Only on the test's own thread.
#define REQUIRE(condition)    \
  do {                        \
    if (!CHECK(condition)) {  \
      throw harness::Ended{}; \
    }                         \
  } while (false)

#define SKIP(why) throw harness::Skipped(why)

int main(int argc, char** argv) {
  return harness::run_all(argc > 1 ? argv[1] : "");
}
