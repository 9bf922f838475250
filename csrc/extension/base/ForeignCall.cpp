#include <extension/base/ForeignCall.h>

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <c10/core/StorageImpl.h>

#include <extension/base/StackWalk.h>
#include <extension/base/ThreadContext.h>

namespace torch_lms {
namespace {

enum class Owner : uint8_t { kKnown, kInterpreter, kForeign };

/// The code of one loaded library.
struct CodeRange {
  uintptr_t begin;
  uintptr_t end;
  Owner owner;
};

using CodeMap = std::vector<CodeRange>;

std::string file_of(const void* address) {
  Dl_info info{};
  return dladdr(address, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

std::string folder_of(const std::string& file) {
  return file.substr(0, file.rfind('/') + 1);
}

/// Knows libraries by what they contain or where they lie, not by their version.
class Libraries {
 public:
  Libraries()
      : own_(file_of(reinterpret_cast<const void*>(&in_foreign_call))),
        torch_lib_(folder_of(file_of(reinterpret_cast<const void*>(&c10::make_storage_impl)))),
        torch_(folder_of(torch_lib_.substr(0, torch_lib_.size() - 1))),
        python_(file_of(dlsym(RTLD_DEFAULT, "Py_GetVersion"))) {}

  Owner owner_of(const std::string& file) const {
    if (file.empty() || file == python_) { // the program itself has no name in the list
      return Owner::kInterpreter;
    }
    const std::string folder = folder_of(file);
    const std::string name = file.substr(folder.size());
    const bool torchs = folder == torch_lib_ || (folder == torch_ && name.rfind("_C.", 0) == 0) ||
                        file.find("/functorch/_C.") != std::string::npos;
    return torchs || file == own_ || is_runtime(name) ? Owner::kKnown : Owner::kForeign;
  }

 private:
  static bool is_runtime(const std::string& name) {
    static constexpr const char* kPrefixes[] = {
        "libc.so",
        "libstdc++",
        "libgcc_s",
        "libpthread",
        "libm.so",
        "libdl.so",
        "ld-linux",
        "linux-vdso",
        "libgomp",
        "libiomp",
        "libomp",
        "libtsan",
        "libasan"};
    return std::any_of(std::begin(kPrefixes), std::end(kPrefixes), [&](const char* prefix) {
      return name.rfind(prefix, 0) == 0;
    });
  }

  const std::string own_;
  const std::string torch_lib_;
  const std::string torch_;
  const std::string python_;
};

/// What `add_library` goes by, and adds to.
struct Mapping {
  const Libraries& libraries;
  CodeMap& map;
};

int add_library(dl_phdr_info* info, size_t, void* context) {
  const auto& mapping = *static_cast<Mapping*>(context);
  const Owner owner = mapping.libraries.owner_of(info->dlpi_name != nullptr ? info->dlpi_name : "");
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr) & header = info->dlpi_phdr[i];
    if (header.p_type == PT_LOAD && (header.p_flags & PF_X) != 0) {
      const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
      mapping.map.push_back(CodeRange{begin, begin + header.p_memsz, owner});
    }
  }
  return 0;
}

const CodeRange* find(const CodeMap& map, uintptr_t address) {
  auto at = std::upper_bound(
      map.begin(), map.end(), address, [](uintptr_t a, const CodeRange& r) { return a < r.begin; });
  return at == map.begin() || address >= (--at)->end ? nullptr : &*at;
}

std::shared_ptr<const CodeMap> map_code() {
  // Made first: it asks the dynamic linker, one of whose locks is held while libraries are gone
  // through. Who loads one takes both in the other order.
  static const auto* libraries = new Libraries();
  auto map = std::make_shared<CodeMap>();
  Mapping mapping{*libraries, *map};
  dl_iterate_phdr(&add_library, &mapping);
  std::sort(map->begin(), map->end(), [](const CodeRange& a, const CodeRange& b) {
    return a.begin < b.begin;
  });
  return map;
}

/// The map of all threads, once `stale` is no longer it.
std::shared_ptr<const CodeMap> current_map(const std::shared_ptr<const CodeMap>& stale) {
  static auto* mutex = new std::mutex();
  static auto* current = new std::shared_ptr<const CodeMap>();
  {
    std::lock_guard<std::mutex> lock(*mutex);
    if (*current != stale) {
      return *current;
    }
  }
  std::shared_ptr<const CodeMap> map = map_code();
  std::lock_guard<std::mutex> lock(*mutex);
  *current = map;
  return map;
}

/// Code that belongs to no library is foreign: somebody has generated it.
Owner owner_of_code(uintptr_t address, std::shared_ptr<const CodeMap>& map) {
  const CodeRange* range = find(*map, address);
  if (range == nullptr) { // a library may have been loaded since
    map = current_map(map);
    range = find(*map, address);
  }
  return range == nullptr ? Owner::kForeign : range->owner;
}

/// Frames further in than the outermost op's are the op's own.
struct Walk {
  uintptr_t outside_of = reinterpret_cast<uintptr_t>(this_thread().op);
  std::shared_ptr<const CodeMap> map;

  Owner owner_of(const StackFrame& frame) {
    return owner_of_code(frame.call, map);
  }
};

/// `walk.visit(frame)` for each frame outside, from the inside out, while it returns true. False
/// for want of memory.
template <typename OfWalk>
bool walk_stack(OfWalk& walk) noexcept {
  const auto visit = [](const StackFrame& frame, void* context) {
    auto& walk = *static_cast<OfWalk*>(context);
    return frame.stack <= walk.outside_of || walk.visit(frame);
  };
  const auto lasts = [](uintptr_t address, void* context) { // PyTorch and Python are not unloaded
    return owner_of_code(address, static_cast<OfWalk*>(context)->map) != Owner::kForeign;
  };
  try {
    walk.map = current_map(nullptr);
    const OfWalk before = walk;
    if (!walk_stack_by_rules(visit, lasts, &walk)) {
      walk = before;
      walk_stack_by_unwinder(visit, &walk);
    }
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

struct ForForeign : Walk {
  bool found = false;

  bool visit(const StackFrame& frame) {
    const Owner owner = owner_of(frame);
    found = owner == Owner::kForeign;
    return owner == Owner::kKnown;
  }
};

struct ForInnermostCall : Walk {
  NativeCall call;
  bool in_interpreter = false;

  bool visit(const StackFrame& frame) {
    in_interpreter = owner_of(frame) == Owner::kInterpreter;
    if (in_interpreter) {
      return false;
    }
    call = {frame.stack, frame.function};
    return true;
  }
};

struct ForCall : Walk {
  NativeCall sought;
  bool called_python = false;
  bool found = false;

  bool visit(const StackFrame& frame) {
    if (frame.stack >= sought.frame) {
      found = frame.stack == sought.frame && called_python && frame.function == sought.function;
      return false;
    }
    called_python = called_python || owner_of(frame) == Owner::kInterpreter;
    return true;
  }
};

} // namespace

bool in_foreign_call() noexcept {
  InForeignCall& kept = this_thread().in_foreign_call;
  if (kept == InForeignCall::kNo || kept == InForeignCall::kYes) {
    return kept == InForeignCall::kYes;
  }
  ForForeign walk;
  const bool known = walk_stack(walk);
  if (known && kept == InForeignCall::kUnknown) {
    kept = walk.found ? InForeignCall::kYes : InForeignCall::kNo;
  }
  return !known || walk.found; // Not to know is no leave to vacate.
}

NativeCall innermost_call() noexcept {
  ForInnermostCall walk;
  return walk_stack(walk) && walk.in_interpreter ? walk.call : NativeCall();
}

bool waits_for_python(const NativeCall& call) noexcept {
  ForCall walk;
  walk.sought = call;
  return call.frame != 0 && (!walk_stack(walk) || walk.found);
}

} // namespace torch_lms
