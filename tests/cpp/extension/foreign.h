#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

// Functions of foreign.so, found by their names.

/// Takes the tensor's address, makes tensors of `elements`, and then reads by the address.
extern "C" int64_t sum_while_allocating(
    const at::Tensor& tensor,
    int64_t elements,
    int64_t tensors);

/// Calls the program.
extern "C" void call_back(void (*call)(void*), void* context);
