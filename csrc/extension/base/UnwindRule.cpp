#include <extension/base/UnwindRule.h>

#include <cstring>
#include <limits>

#if defined(__x86_64__)

extern "C" {
/// Of the runtime's unwinder, which has no header for it.
struct dwarf_eh_bases {
  void* tbase;
  void* dbase;
  void* func;
};
const void* _Unwind_Find_FDE(void* address, dwarf_eh_bases* bases);
}

namespace torch_lms {
namespace {

// DWARF's numbers of registers (System V ABI for AMD64, 3.6.2).
constexpr uint64_t kFramePointer = 6;
constexpr uint64_t kStackPointer = 7;
constexpr uint64_t kReturnAddress = 16;
/// As an entry's length: a longer one follows, of an entry in another format.
constexpr uint32_t kLonger = UINT32_MAX;

/// Reads a section.
class Reader {
 public:
  explicit Reader(const uint8_t* at) : at_(at) {}

  template <typename T>
  T take() {
    T value;
    std::memcpy(&value, at_, sizeof value);
    at_ += sizeof value;
    return value;
  }

  uint64_t unsigned_leb() {
    uint64_t value = 0;
    for (unsigned shift = 0;; shift += 7) {
      const auto byte = take<uint8_t>();
      value |= shift < 64 ? static_cast<uint64_t>(byte & 0x7f) << shift : 0;
      if ((byte & 0x80) == 0) {
        return value;
      }
    }
  }

  int64_t signed_leb() {
    uint64_t value = 0;
    for (unsigned shift = 0;;) {
      const auto byte = take<uint8_t>();
      value |= shift < 64 ? static_cast<uint64_t>(byte & 0x7f) << shift : 0;
      shift += 7;
      if ((byte & 0x80) == 0) {
        const bool negative = (byte & 0x40) != 0 && shift < 64;
        return static_cast<int64_t>(negative ? value | (~uint64_t{0} << shift) : value);
      }
    }
  }

  void skip(uint64_t nbytes) {
    at_ += nbytes;
  }
  const uint8_t* at() const {
    return at_;
  }

 private:
  const uint8_t* at_;
};

/// Bytes of a pointer so encoded; 0 if that is not fixed.
size_t bytes_of_pointer(uint8_t encoding) {
  switch (encoding & 0x0f) {
    case 0x00: // as an address
    case 0x04:
    case 0x0c:
      return (encoding & 0x70) == 0x50 ? 0 : 8; // else it is aligned
    case 0x03:
    case 0x0b:
      return 4;
    case 0x02:
    case 0x0a:
      return 2;
    default:
      return 0;
  }
}

/// What is common to several functions (a CIE).
struct Common {
  bool known = false;
  uint64_t code_unit = 1;
  int64_t data_unit = 1;
  bool sized = false; ///< A length goes before what is added to a function's entry.
  size_t pointer_bytes = 8;
  const uint8_t* program = nullptr;
  const uint8_t* end = nullptr;
};

Common read_common(const uint8_t* entry) {
  Common common;
  Reader in(entry);
  const auto nbytes = in.take<uint32_t>();
  if (nbytes == kLonger) {
    return common;
  }
  common.end = in.at() + nbytes;
  in.skip(sizeof(uint32_t)); // that it is a common one
  const auto version = in.take<uint8_t>();
  const char* added = reinterpret_cast<const char*>(in.at());
  in.skip(std::strlen(added) + 1);
  common.code_unit = in.unsigned_leb();
  common.data_unit = in.signed_leb();
  const uint64_t returns_to = version == 1 ? in.take<uint8_t>() : in.unsigned_leb();
  if ((version != 1 && version != 3) || returns_to != kReturnAddress ||
      (*added != '\0' && *added != 'z')) {
    return common;
  }
  const uint8_t* program = in.at();
  for (; *added != '\0'; ++added) {
    switch (*added) {
      case 'z': {
        common.sized = true;
        const uint64_t added_bytes = in.unsigned_leb();
        program = in.at() + added_bytes;
        break;
      }
      case 'R':
        common.pointer_bytes = bytes_of_pointer(in.take<uint8_t>());
        break;
      case 'P': {
        const size_t pointer_bytes = bytes_of_pointer(in.take<uint8_t>());
        if (pointer_bytes == 0) {
          return common;
        }
        in.skip(pointer_bytes);
        break;
      }
      case 'L':
        in.skip(1);
        break;
      default: // a signal's frame, or something new
        return common;
    }
  }
  common.program = program;
  common.known = common.pointer_bytes != 0;
  return common;
}

/// A register's value in the caller.
struct Saved {
  enum class How : uint8_t { kSame, kAtOffset, kUndefined, kOtherwise };
  How how = How::kSame;
  int64_t offset = 0;
};

struct Row {
  bool base_known = false;
  uint64_t base = 0;
  int64_t offset = 0;
  Saved frame_pointer;
  Saved return_address;
};

/// Carries out the compiler's program for a function, up to one address of it.
class RowProgram {
 public:
  RowProgram(const Common& common, uint64_t function, uint64_t address)
      : common_(common), location_(function), address_(address) {}

  /// False for what it does not know.
  bool run(const uint8_t* begin, const uint8_t* end) {
    Reader in(begin);
    while (in.at() < end && location_ <= address_) {
      if (!step(in)) {
        return false;
      }
    }
    return true;
  }

  const Row& row() const {
    return row_;
  }

 private:
  bool step(Reader& in) {
    const auto code = in.take<uint8_t>();
    const uint8_t low = code & 0x3f;
    switch (code & 0xc0) {
      case 0x40:
        return advance(low);
      case 0x80:
        return set(
            low,
            {Saved::How::kAtOffset, static_cast<int64_t>(in.unsigned_leb()) * common_.data_unit});
      case 0xc0: // as it is in the common part, where the caller's frame pointer is the function's
        return low != kReturnAddress && set(low, {Saved::How::kSame, 0});
      default:
        return extended(low, in);
    }
  }

  /// The others are left to the unwinder.
  bool extended(uint8_t code, Reader& in) {
    switch (code) {
      case 0x00: // nothing
        return true;
      case 0x02:
        return advance(in.take<uint8_t>());
      case 0x03:
        return advance(in.take<uint16_t>());
      case 0x04:
        return advance(in.take<uint32_t>());
      case 0x07:
        return set(in.unsigned_leb(), {Saved::How::kUndefined, 0});
      case 0x08:
        return set(in.unsigned_leb(), {Saved::How::kSame, 0});
      case 0x0a:
        return remember();
      case 0x0b:
        return recall();
      case 0x0c: {
        const uint64_t base = in.unsigned_leb();
        return set_base(base, static_cast<int64_t>(in.unsigned_leb()));
      }
      case 0x0d:
        return set_base(in.unsigned_leb(), row_.offset);
      case 0x0e:
        row_.offset = static_cast<int64_t>(in.unsigned_leb());
        return true;
      case 0x0f: // the base by an expression
        row_.base_known = false;
        in.skip(in.unsigned_leb());
        return true;
      case 0x10:
      case 0x16: { // a register by an expression
        const uint64_t which = in.unsigned_leb();
        in.skip(in.unsigned_leb());
        return set(which, {Saved::How::kOtherwise, 0});
      }
      case 0x2e: // the size of arguments
        in.unsigned_leb();
        return true;
      default:
        return false;
    }
  }

  bool advance(uint64_t units) {
    location_ += units * common_.code_unit;
    return true;
  }

  bool set(uint64_t which, Saved saved) {
    if (which == kStackPointer) {
      return false; // it is the base's, in all that is known here
    }
    if (which == kFramePointer) {
      row_.frame_pointer = saved;
    } else if (which == kReturnAddress) {
      row_.return_address = saved;
    }
    return true;
  }

  bool set_base(uint64_t base, int64_t offset) {
    row_.base_known = true;
    row_.base = base;
    row_.offset = offset;
    return true;
  }

  bool remember() {
    if (remembered_ == kMostRemembered) {
      return false;
    }
    rows_[remembered_++] = row_;
    return true;
  }
  bool recall() {
    if (remembered_ == 0) {
      return false;
    }
    row_ = rows_[--remembered_];
    return true;
  }

  static constexpr size_t kMostRemembered = 8;

  const Common& common_;
  uint64_t location_;
  const uint64_t address_;
  Row row_;
  Row rows_[kMostRemembered];
  size_t remembered_ = 0;
};

bool fits(int64_t offset) {
  return offset >= std::numeric_limits<int32_t>::min() &&
         offset <= std::numeric_limits<int32_t>::max();
}

UnwindRule rule_of(const Row& row, uintptr_t function) {
  UnwindRule rule;
  rule.function = function;
  if (row.return_address.how == Saved::How::kUndefined) {
    rule.base = UnwindRule::Base::kEnd;
    return rule;
  }
  const bool saved = row.frame_pointer.how == Saved::How::kAtOffset;
  const bool known = row.base_known && (row.base == kStackPointer || row.base == kFramePointer) &&
                     row.return_address.how == Saved::How::kAtOffset &&
                     row.return_address.offset == -static_cast<int64_t>(sizeof(void*)) &&
                     (saved || row.frame_pointer.how == Saved::How::kSame) && fits(row.offset) &&
                     fits(row.frame_pointer.offset);
  if (known) {
    rule.base = row.base == kStackPointer ? UnwindRule::Base::kStackPointer
                                          : UnwindRule::Base::kFramePointer;
    rule.saves_frame_pointer = saved;
    rule.to_callers_stack = static_cast<int32_t>(row.offset);
    rule.to_frame_pointer = static_cast<int32_t>(row.frame_pointer.offset);
  }
  return rule;
}

} // namespace

UnwindRule unwind_rule_at(uintptr_t address) noexcept {
  dwarf_eh_bases bases{};
  const auto* entry = static_cast<const uint8_t*>(
      _Unwind_Find_FDE(reinterpret_cast<void*>(address), &bases)); // NOLINT
  if (entry == nullptr) {
    return {};
  }
  Reader in(entry);
  const auto nbytes = in.take<uint32_t>();
  if (nbytes == kLonger) {
    return {};
  }
  const uint8_t* const here = in.at();
  const uint8_t* const end = here + nbytes;
  const Common common = read_common(here - in.take<int32_t>());
  if (!common.known) {
    return {};
  }
  in.skip(2 * common.pointer_bytes); // where the function begins, and how long it is
  if (common.sized) {
    in.skip(in.unsigned_leb());
  }
  const auto function = reinterpret_cast<uintptr_t>(bases.func);
  RowProgram program(common, function, address);
  const bool known = program.run(common.program, common.end) &&
                     program.row().frame_pointer.how == Saved::How::kSame &&
                     program.run(in.at(), end);
  return known ? rule_of(program.row(), function) : UnwindRule();
}

} // namespace torch_lms

#else

namespace torch_lms {

UnwindRule unwind_rule_at(uintptr_t) noexcept {
  return {};
}

} // namespace torch_lms

#endif
