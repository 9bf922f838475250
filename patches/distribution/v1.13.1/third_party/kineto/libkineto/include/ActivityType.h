#pragma once

// The names that torch/csrc/profiler compiles in without Kineto as well (USE_KINETO=0).
namespace libkineto {

enum class ActivityType {
  CPU_OP,
  USER_ANNOTATION,
  GPU_USER_ANNOTATION,
  GPU_MEMCPY,
  GPU_MEMSET,
  CONCURRENT_KERNEL,
  EXTERNAL_CORRELATION,
  CUDA_RUNTIME,
  CUDA_PROFILER_RANGE,
  GLOW_RUNTIME,
  CPU_INSTANT_EVENT,
  PYTHON_FUNCTION,
};

} // namespace libkineto
