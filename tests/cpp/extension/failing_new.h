#pragma once

#include <link.h>

#include <cstdint>
#include <cstring>

#include "../failing_new.h"

// As the core's, but what fails is an allocation that the extension's own code makes. (What PyTorch
// allocates on its behalf is PyTorch's.) For one file.

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

inline bool is_of_the_extension(const void* caller) {
  static const ExtensionCode code;
  return code.contains(caller);
}

inline const bool only_the_extensions = [] {
  is_of_the_extension(nullptr); // the code is found before anything may fail
  may_fail() = &is_of_the_extension;
  return true;
}();
