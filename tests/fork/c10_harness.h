#pragma once

// The test harness beside c10, whose logging has macros of the same names.

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Logging.h>

#undef CHECK
#undef CHECK_EQ

#include "harness.h"
