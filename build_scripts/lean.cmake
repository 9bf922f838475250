# Read by PyTorch's CMake in the lean profile: kernels for one instruction set, not three.
foreach(language C CXX)
  foreach(set AVX2 AVX512)
    foreach(attempt 1 2 3)
      set(${language}_HAS_${set}_${attempt} 0 CACHE INTERNAL "left out by the lean profile")
    endforeach()
  endforeach()
endforeach()

if(USE_CUDA)
  include("${CMAKE_CURRENT_LIST_DIR}/lean_cuda/lean_cuda.cmake")
endif()
