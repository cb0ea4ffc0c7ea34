#include <cmath>
#include <cstring>
#include <unordered_map>

#include "decode/decoder.hpp"
#include "decode/text.hpp"
#include "machine/wave.hpp"

namespace amdemu {

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  int depth = 0;
  std::size_t begin = 0;
  for (std::size_t n = 0; n <= text.size(); ++n) {
    if (n == text.size() || (text[n] == separator && depth == 0)) {
      const std::string_view part = trim(text.substr(begin, n - begin));
      if (!part.empty()) parts.push_back(part);
      begin = n + 1;
    } else if (text[n] == '[' || text[n] == '(') {
      ++depth;
    } else if (text[n] == ']' || text[n] == ')') {
      --depth;
    }
  }
  return parts;
}

namespace {

void set_register(Operand& o, Operand::Kind kind, long reg, long dwords) {
  o.kind = kind;
  o.reg = static_cast<std::uint16_t>(reg);
  o.dwords = static_cast<std::uint8_t>(dwords);
}

bool parse_named_register(std::string_view text, Operand& o) {
  struct Named {
    int reg, dwords;
  };
  static const std::unordered_map<std::string_view, Named> names = {
      {"vcc", {kVcc, 2}},
      {"vcc_lo", {kVcc, 1}},
      {"vcc_hi", {kVcc + 1, 1}},
      {"exec", {kExec, 2}},
      {"exec_lo", {kExec, 1}},
      {"exec_hi", {kExec + 1, 1}},
      {"m0", {kM0, 1}},
      {"scc", {kScc, 1}},
      {"src_scc", {kScc, 1}},
      {"null", {kNullSink, 2}},
      {"flat_scratch", {kFlatScratch, 2}},
      {"flat_scratch_lo", {kFlatScratch, 1}},
      {"flat_scratch_hi", {kFlatScratch + 1, 1}},
      {"xnack_mask", {kXnackMask, 2}},
      {"xnack_mask_lo", {kXnackMask, 1}},
      {"xnack_mask_hi", {kXnackMask + 1, 1}},
      {"src_shared_base", {kSharedBase, 2}},
      {"src_private_base", {kPrivateBase, 2}},
  };
  const auto found = names.find(text);
  if (found == names.end()) return false;
  set_register(o, Operand::kSgpr, found->second.reg, found->second.dwords);
  return true;
}

/// v7, a[0:3], s[2:3], ttmp9.
bool parse_numbered_register(std::string_view text, Operand& o) {
  Operand::Kind kind = Operand::kSgpr;
  int base = 0;
  if (take(text, "ttmp"))
    base = kTtmp;
  else if (take(text, "v"))
    kind = Operand::kVgpr;
  else if (take(text, "a"))
    kind = Operand::kVgpr, base = kAccBase;
  else if (!take(text, "s"))
    return false;
  const bool is_range = take(text, "[");
  if (text.empty() || text[0] < '0' || text[0] > '9') return false;
  const std::size_t colon = is_range ? text.find(':') : std::string_view::npos;
  const long first = number(text);
  const long last = colon == std::string_view::npos ? first : number(text.substr(colon + 1));
  set_register(o, kind, base + first, last - first + 1);
  return true;
}

void parse_immediate(const std::string& text, Operand& o) {
  o.kind = Operand::kImmediate;
  char* end = nullptr;
  if (text.starts_with("0x") || text.starts_with("-0x")) {
    o.is_literal = true;
    o.imm = static_cast<std::uint32_t>(std::strtoll(text.c_str(), &end, 16));
  } else if (text.find('.') != std::string::npos) {
    o.is_float = true;
    o.value = std::strtod(text.c_str(), &end);
    const auto single = static_cast<float>(o.value);
    std::memcpy(&o.imm, &single, sizeof(single));
    constexpr std::uint32_t kInverseOfTurn = 0x3e22f983U;  // 1 / (2 pi), printed as 0.15915494
    if (std::abs(o.value - 0.15915494) < 1e-6) o.imm = kInverseOfTurn;
  } else {
    o.imm = static_cast<std::uint32_t>(std::strtol(text.c_str(), &end, 10));
  }
  if (end == text.c_str() || *end != 0) not_understood("operand `" + text + "` is not understood");
}

/// Takes WRAPPER( and the closing bracket off.
bool unwrap(std::string_view& text, std::string_view wrapper) {
  if (!take(text, wrapper)) return false;
  text.remove_suffix(1);
  return true;
}

}  // namespace

Operand parse_operand(std::string_view text) {
  Operand o;
  text = trim(text);
  if (text == "off") {
    o.kind = Operand::kOff;
    return o;
  }
  const bool is_negative_number =
      text.size() > 1 && text[0] == '-' && text[1] >= '0' && text[1] <= '9';
  if (!is_negative_number && take(text, "-")) o.neg = true;
  if (unwrap(text, "neg(")) o.neg = true;
  if (unwrap(text, "|") || unwrap(text, "abs(")) o.abs = true;
  if (unwrap(text, "sext(")) o.sext = true;
  unwrap(text, "lit(");
  if (!parse_named_register(text, o) && !parse_numbered_register(text, o))
    parse_immediate(std::string(text), o);
  return o;
}

}  // namespace amdemu
