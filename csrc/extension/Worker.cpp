#include <extension/OpObserver.h>

// A build with CUDA has its own in cuda/CudaDevice.cpp.
#ifndef TORCH_LMS_WITH_CUDA
namespace torch_lms {

void prepare_worker() {}

} // namespace torch_lms
#endif
