#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>

namespace torch_lms {

/// How a record that PyTorch makes is to be watched.
enum class OpKind : uint8_t {
  /// Not an op.
  kTransparent,
  /// The autograd engine goes on to a node.
  kNode,
  /// An op that makes other views of its tensors, and looks at their sizes only.
  kView,
  /// An op that only calls others (CompositeImplicitAutograd): those are watched. What it uses
  /// comes in, but need not stay until it ends: it holds tensors, no addresses.
  kComposite,
  /// An op of PyTorch's with a kernel: it gets its tensors' addresses, so what it uses is pinned
  /// until it ends. What it calls uses the same, or what it has made.
  kSealed,
  /// Somebody else's op: the same, and so is what it calls, which may use anything.
  kHolding,
  /// The same, and it goes on using its tensors on other streams after it has ended.
  kCollective,
  /// PyTorch's own, and looks at more of a storage than its bytes: see Note [Watched blocks].
  kInspecting,
};

struct OpTraits {
  OpKind kind = OpKind::kTransparent;
  /// A bit for each argument that the op may write to; the last one stands for all others.
  uint64_t written = 0;
  /// Kernels of autocast's, which cast the op's tensors and call it again, below autocast.
  c10::DispatchKeySet casts;
  /// A hash of the op's name.
  size_t name = 0;
  /// As many as the op has by its schema; 0 where that is not known.
  uint32_t arguments = 0;
  /// See Note [Addresses that are only read through].
  bool takes_addresses = false;
  /// It leaves what it makes for somebody else to fill, who may do so by its address.
  bool makes_empty = false;

  bool writes(size_t argument) const noexcept {
    return (written >> (argument < 63 ? argument : 63) & 1) != 0;
  }
};

/// What the records are that one thread has seen.
///
/// Not thread-safe: a thread's own.
class OpKinds {
 public:
  /// Blocks, for an op's first time, on the dispatcher's lock. `name`: the record's. The traits are
  /// those of the op that begins: others may take their place when the next one does.
  OpTraits of(const at::RecordFunction& record, const char* name) {
    const Known& known = known_of(name);
    return known.address == name && std::strcmp(known.name.data(), name) == 0
               ? known.traits
               : look_up(record, name);
  }

  /// The kind of an op that begins, of such traits: under autocast some only call others.
  static OpKind kind_now(const at::RecordFunction& record, const OpTraits& op) {
    return op.kind != OpKind::kSealed || op.casts.empty() || !casts_now(record, op.casts)
               ? op.kind
               : OpKind::kComposite;
  }

 private:
  /// Names are compared, too: only those of ops stay where they are.
  struct Known {
    const char* address = nullptr;
    OpTraits traits;
    std::array<char, 80> name{}; // PyTorch's own have up to 63
  };

  Known& known_of(const char* name) noexcept {
    return known_[(reinterpret_cast<uintptr_t>(name) >> 4) % known_.size()];
  }
  OpTraits look_up(const at::RecordFunction& record, const char* name);
  /// Whether autocast's kernel is about to run: not inside of what it calls.
  static bool casts_now(const at::RecordFunction& record, c10::DispatchKeySet casts);

  std::array<Known, 512> known_;
};

} // namespace torch_lms
