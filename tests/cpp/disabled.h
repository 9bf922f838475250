#pragma once

#include "harness.h"

// A test of what the core should do and does not yet. It is compiled, and it is run only
// by a program that was compiled with TORCH_LMS_DISABLED_TESTS. The reason stands above it.
#ifdef TORCH_LMS_DISABLED_TESTS
#define DISABLED_TEST(name) TEST(name)
#else
#define DISABLED_TEST(name) [[gnu::unused]] static void disabled_##name()
#endif
