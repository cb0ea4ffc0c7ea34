// Loads, stores and atomics: the space, what is done, and of which size stand in the name. Names
// differ between generations.
#include <cstring>
#include <optional>
#include <unordered_map>

#include "decode/decoder.hpp"
#include "decode/text.hpp"
#include "machine/wave.hpp"

namespace amdemu {
namespace {

enum class What { kLoad, kStore, kAtomic };

bool take_space(std::string_view& name, MemoryControl& m) {
  struct Space {
    const char* prefix;
    MemoryControl::Space space;
  };
  static constexpr Space kSpaces[] = {{"global_", MemoryControl::kGlobal},
                                      {"flat_", MemoryControl::kFlat},
                                      {"scratch_", MemoryControl::kScratch},
                                      {"buffer_", MemoryControl::kBuffer},
                                      {"ds_", MemoryControl::kLocal}};
  for (const Space& each : kSpaces) {
    if (!take(name, each.prefix)) continue;
    m.space = each.space;
    return true;
  }
  return false;
}

/// Longer prefixes come first. `stride`: in elements.
std::optional<What> take_what(std::string_view& name, MemoryControl& m) {
  struct Prefix {
    const char* text;
    What what;
    std::uint8_t count;
    std::uint16_t stride;
  };
  static constexpr Prefix kLocal[] = {
      {"read2st64_", What::kLoad, 2, 64},
      {"read2_", What::kLoad, 2, 1},
      {"read_", What::kLoad, 1, 0},
      {"load_2addr_stride64_", What::kLoad, 2, 64},
      {"load_2addr_", What::kLoad, 2, 1},
      {"load_", What::kLoad, 1, 0},
      {"write2st64_", What::kStore, 2, 64},
      {"write2_", What::kStore, 2, 1},
      {"write_", What::kStore, 1, 0},
      {"store_2addr_stride64_", What::kStore, 2, 64},
      {"store_2addr_", What::kStore, 2, 1},
      {"store_", What::kStore, 1, 0},
      {"", What::kAtomic, 1, 0},
  };
  static constexpr Prefix kOther[] = {{"load_", What::kLoad, 1, 0},
                                      {"store_", What::kStore, 1, 0},
                                      {"atomic_", What::kAtomic, 1, 0}};
  const auto among = [&](const auto& prefixes) -> std::optional<What> {
    for (const Prefix& each : prefixes) {
      if (!take(name, each.text)) continue;
      m.count = each.count, m.stride = each.stride;
      return each.what;
    }
    return std::nullopt;
  };
  return m.space == MemoryControl::kLocal ? among(kLocal) : among(kOther);
}

/// What a load or store moves: dwordx2, u8, short_d16_hi, d16_hi_b8 ...
bool decode_element(std::string type, MemoryControl& m) {
  struct Element {
    std::uint8_t bytes;
    bool is_signed;
  };
  static const std::unordered_map<std::string, Element> elements = {
      {"ubyte", {1, false}},  {"sbyte", {1, true}},    {"byte", {1, false}},
      {"u8", {1, false}},     {"i8", {1, true}},       {"b8", {1, false}},
      {"ushort", {2, false}}, {"sshort", {2, true}},   {"short", {2, false}},
      {"u16", {2, false}},    {"i16", {2, true}},      {"b16", {2, false}},
      {"dword", {4, false}},  {"dwordx2", {8, false}}, {"dwordx3", {12, false}},
      {"b32", {4, false}},    {"b64", {8, false}},     {"b96", {12, false}},
      {"b128", {16, false}},  {"dwordx4", {16, false}}};
  const auto remove = [&](const char* piece) {
    const std::size_t at = type.find(piece);
    if (at == std::string::npos) return false;
    type.erase(at, std::strlen(piece));
    return true;
  };
  m.high = remove("_d16_hi") || remove("d16_hi_");
  m.d16 = m.high || remove("_d16") || remove("d16_");
  const auto found = elements.find(type);
  if (found == elements.end()) return false;
  m.bytes = found->second.bytes;
  m.is_signed = found->second.is_signed;
  m.stride = static_cast<std::uint16_t>(m.stride * m.bytes);
  return true;
}

/// add_u32, umax_x2, cmpstore_rtn_b64, pk_add_f16 ...
bool decode_atomic(std::string_view name, MemoryControl& m) {
  static const std::unordered_map<std::string_view, AtomicOp> operations = {
      {"swap", AtomicOp::kSwap},
      {"wrxchg", AtomicOp::kSwap},
      {"storexchg", AtomicOp::kSwap},
      {"cmpswap", AtomicOp::kCompareSwap},
      {"cmpst", AtomicOp::kCompareSwap},
      {"cmpstore", AtomicOp::kCompareSwap},
      {"add", AtomicOp::kAdd},
      {"sub", AtomicOp::kSub},
      {"min", AtomicOp::kUnsignedMin},
      {"max", AtomicOp::kUnsignedMax},
      {"smin", AtomicOp::kSignedMin},
      {"smax", AtomicOp::kSignedMax},
      {"umin", AtomicOp::kUnsignedMin},
      {"umax", AtomicOp::kUnsignedMax},
      {"and", AtomicOp::kAnd},
      {"or", AtomicOp::kOr},
      {"xor", AtomicOp::kXor},
      {"inc", AtomicOp::kIncrement},
      {"dec", AtomicOp::kDecrement},
      // With the type that gives them another meaning.
      {"add f", AtomicOp::kAddFloat},
      {"min f", AtomicOp::kMinFloat},
      {"max f", AtomicOp::kMaxFloat},
      {"min i", AtomicOp::kSignedMin},
      {"max i", AtomicOp::kSignedMax},
      {"pk_add_f16", AtomicOp::kPackedAddF16},
      {"pk_add_bf16", AtomicOp::kPackedAddBF16},
  };
  std::string operation;  // the words that are neither a type nor _rtn
  char type = 'u';
  for (const std::string_view word : split(name, '_')) {
    if (word == "rtn") {
      m.returns = true;
    } else if (word == "x2" || word.ends_with("64")) {
      m.bytes = 8;
      if (word != "x2") type = word[0];
    } else if (word.ends_with("32")) {
      type = word[0];
    } else if (word != "num") {
      operation += (operation.empty() ? "" : "_") + std::string(word);
    }
  }
  auto found = operations.find(operation + " " + type);
  if (found == operations.end()) found = operations.find(operation);
  if (found == operations.end()) return false;
  m.op = found->second;
  return true;
}

/// Which source is what. Stores and atomics of buffers have their data before the address.
void assign_sources(What what, bool has_dst, const std::string& name, Instruction& i,
                    MemoryControl& m) {
  std::int8_t next = 0;
  if (m.space == MemoryControl::kBuffer) {
    if (what == What::kAtomic && has_dst) {  // one register is data and result
      i.src[4] = i.dst[0];
      m.data = 4;
    } else if (what != What::kLoad && !has_dst) {
      m.data = next++;
    }
    m.address = next++, m.base = next++, m.soffset = next++;
    return;
  }
  m.address = next++;
  if (what != What::kLoad) {
    m.data = next++;
    if (m.space == MemoryControl::kLocal && next < i.num_src) m.data1 = next++;
  }
  // ds_cmpst has what to compare with first, ds_cmpstore the new value.
  if (name.starts_with("ds_cmpst_")) std::swap(m.data, m.data1);
  if (next < i.num_src) m.base = next++;
}

}  // namespace

bool decode_memory(const std::string& name, const std::vector<Operand>& operands,
                   const Handlers& handlers, Instruction& i) {
  std::string_view rest = name;
  MemoryControl m;
  if (!take_space(rest, m)) return false;
  const std::optional<What> what = take_what(rest, m);
  if (!what) return false;
  const bool is_local = m.space == MemoryControl::kLocal;
  const bool to_local = !is_local && *what == What::kLoad && (take(rest, "lds_") || i.lds);
  if (*what == What::kAtomic) {
    if (!decode_atomic(rest, m)) return false;
    if (!is_local) m.returns = i.returns;
  } else if (!decode_element(std::string(rest), m)) {
    return false;
  }
  const bool has_dst = (*what == What::kLoad && !to_local) || (*what == What::kAtomic && m.returns);
  std::size_t at = 0;
  if (has_dst) i.dst[0] = operands.at(at++), i.num_dst = 1;
  for (; at < operands.size() && i.num_src < 5; ++at) i.src[i.num_src++] = operands[at];
  assign_sources(*what, has_dst, name, i, m);
  i.memory = std::make_shared<MemoryControl>(m);
  i.handler = to_local                ? handlers.load_to_local
              : *what == What::kLoad  ? handlers.load
              : *what == What::kStore ? handlers.store
                                      : handlers.atomic;
  return true;
}

}  // namespace amdemu
