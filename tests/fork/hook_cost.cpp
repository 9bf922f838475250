// Accesses a storage that has never been paged out; for a counter of instructions, with and without
// the hook.
//
//   hook_cost data N       N times StorageImpl::data()
//   hook_cost tensor N     N times TensorImpl::data_ptr_impl<T>(), as an operator does
//   hook_cost nothing N    the loop alone
//   hook_cost sizeof       the size of a StorageImpl

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

namespace {

// Memory may have changed since the last access, as far as the compiler knows.
void forget() {
  asm volatile("" : : : "memory");
}

// The compiler has to have the value in a register.
template <class T>
void need(T value) {
  asm volatile("" : : "r"(value));
}

// Eight times in a row, so that what the loop itself takes does not count.
template <class Body>
void repeat(const char* name, long times, const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  for (long i = 0; i < times; i += 8) {
    body(), body(), body(), body(), body(), body(), body(), body();
  }
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  std::printf("%s %.3f ns\n", name, took.count() / static_cast<double>(times));
}

} // namespace

int main(int argc, char** argv) {
  const char* what = argc > 1 ? argv[1] : "sizeof";
  const long times = argc > 2 ? std::atol(argv[2]) : 1;
  if (std::strcmp(what, "sizeof") == 0) {
    std::printf("sizeof %zu\n", sizeof(c10::StorageImpl));
    return 0;
  }
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), 64, c10::GetCPUAllocator(), /*resizable=*/true);
  auto tensor = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(storage),
      c10::DispatchKeySet(c10::DispatchKey::CPU),
      caffe2::TypeMeta::Make<float>());
  tensor->set_sizes_contiguous({16});
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  c10::TensorImpl* accessed = tensor.get();
  if (std::strcmp(what, "data") == 0) {
    repeat(what, times, [impl] {
      forget();
      need(impl->data());
    });
  } else if (std::strcmp(what, "tensor") == 0) {
    repeat(what, times, [accessed] {
      forget();
      need(accessed->data_ptr_impl<float>());
    });
  } else {
    repeat(what, times, [] { forget(); });
  }
  return 0;
}
