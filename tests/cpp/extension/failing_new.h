#pragma once

#include <link.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

// Replaces the program's `new`, so that a chosen allocation of the extension's fails: one that its
// own code makes. (What PyTorch allocates on its behalf is PyTorch's.) For one file.

struct ExtensionCode {
  uintptr_t begin = 0;
  uintptr_t end = 0;

  ExtensionCode() {
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* context) {
          auto& code = *static_cast<ExtensionCode*>(context);
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            const ElfW(Phdr) & header = info->dlpi_phdr[i];
            if (header.p_type == PT_LOAD && (header.p_flags & PF_X) != 0 &&
                std::strstr(info->dlpi_name, "libextension.so") != nullptr) {
              code.begin = info->dlpi_addr + header.p_vaddr;
              code.end = code.begin + header.p_memsz;
            }
          }
          return 0;
        },
        this);
  }
  bool contains(const void* address) const {
    return reinterpret_cast<uintptr_t>(address) - begin < end - begin;
  }
};

/// Allocations of this thread until one fails; negative for none that fails.
inline thread_local long allocations_until_failure = -1;
inline ExtensionCode extension_code;

/// While it lives, one allocation of the calling thread fails: the `nth` from now.
class FailingNew {
 public:
  explicit FailingNew(long nth) {
    allocations_until_failure = nth;
  }
  ~FailingNew() {
    allocations_until_failure = -1;
  }
  FailingNew(const FailingNew&) = delete;
  FailingNew& operator=(const FailingNew&) = delete;

  bool failed() const {
    return allocations_until_failure < 0;
  }
};

[[gnu::noinline]] void* operator new(std::size_t nbytes) {
  if (allocations_until_failure >= 0 && extension_code.contains(__builtin_return_address(0)) &&
      allocations_until_failure-- == 0) {
    throw std::bad_alloc();
  }
  void* data = std::malloc(nbytes);
  if (data == nullptr) {
    throw std::bad_alloc();
  }
  return data;
}

[[gnu::noinline]] void operator delete(void* data) noexcept {
  std::free(data);
}

[[gnu::noinline]] void operator delete(void* data, std::size_t) noexcept {
  std::free(data);
}
