#pragma once

// The harness beside PyTorch, whose log has macros of the same names.

#include <c10/util/Logging.h>

#undef CHECK
#undef CHECK_EQ

#include "../harness.h"
