#include <extension/base/UnreadableMemory.h>

#include <sys/mman.h>

#include <cstddef>

#include <entity/Error.h>

namespace torch_lms {

void* unreadable_memory() {
  static constexpr size_t kBytes = size_t{1} << 40;
  static void* const address =
      mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) {
    throw Error(
        "expected 1 TiB of address space for storages that are dropped, found none; raise the "
        "process's limit (ulimit -v), or call torch_lms.enable(recompute=False)");
  }
  return address;
}

} // namespace torch_lms
