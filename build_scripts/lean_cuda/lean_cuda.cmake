# Takes the files that left_out.txt names out of PyTorch's CUDA libraries, once CMake has read all of PyTorch. What others
# still call of them is defined by link.py: an error that says so.
cmake_minimum_required(VERSION 3.19) # DEFER
set(LEAN_CUDA "${CMAKE_CURRENT_LIST_DIR}")

function(lean_leave_out target)
  file(STRINGS "${LEAN_CUDA}/left_out.txt" patterns REGEX "^[^#]")
  get_target_property(sources ${target} SOURCES)
  set(kept "")
  foreach(source IN LISTS sources)
    set(keep TRUE)
    foreach(pattern IN LISTS patterns)
      if(source MATCHES "/${pattern}$")
        set(keep FALSE)
      endif()
    endforeach()
    if(keep)
      list(APPEND kept "${source}")
    endif()
  endforeach()
  set_target_properties(${target} PROPERTIES SOURCES "${kept}")
endfunction()

function(lean_cuda)
  if(NOT TARGET torch_cuda)
    return()
  endif()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${LEAN_CUDA}/left_out.txt")
  lean_leave_out(torch_cuda)
  lean_leave_out(torch_python)
  target_sources(torch_cuda PRIVATE "${LEAN_CUDA}/left_out.cpp")
  # PyTorch leaves cuBLASLt to what cuBLAS loads; a link that allows nothing undefined has to name it.
  if(CUDA_cublas_LIBRARY)
    get_filename_component(libraries "${CUDA_cublas_LIBRARY}" DIRECTORY)
    target_link_libraries(torch_cuda PRIVATE "${libraries}/libcublasLt.so")
  endif()
  # libtorch_python leaves these to what libtorch_cpu loads.
  foreach(library ONNX_LIBRARY ONNX_PROTO_LIBRARY Protobuf_LIBRARY_RELEASE)
    if(${library})
      target_link_libraries(torch_python PRIVATE "${${library}}")
    endif()
  endforeach()
  # Only libraries that are called.
  target_link_options(torch_cuda PRIVATE "LINKER:--as-needed")
  target_link_options(torch_global_deps PRIVATE "LINKER:--as-needed")
  foreach(target torch_cuda torch_python)
    set_target_properties(${target} PROPERTIES
      LINK_DEPENDS "${LEAN_CUDA}/link.py"
      RULE_LAUNCH_LINK "${PYTHON_EXECUTABLE} ${LEAN_CUDA}/link.py ${CMAKE_BINARY_DIR}/left_out_of_${target}.txt")
  endforeach()
endfunction()

cmake_language(DEFER CALL lean_cuda)
