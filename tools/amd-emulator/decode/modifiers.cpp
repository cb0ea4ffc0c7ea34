// What stands behind the operands: offsets, op_sel, DPP, SDWA ...
#include <algorithm>
#include <array>
#include <functional>
#include <unordered_map>

#include "decode/decoder.hpp"
#include "decode/text.hpp"

namespace amdemu {
namespace {

/// `name:value`; words without a colon have no value.
struct Modifier {
  std::string_view word, name, value;
  int wave = 64;
  int n() const { return value.empty() ? 0 : static_cast<int>(number(value)); }
  std::uint8_t byte() const { return static_cast<std::uint8_t>(n()); }
  /// [1,0,1]: a bit each.
  std::uint8_t bits() const {
    unsigned bits = 0, count = 0;
    for (const char c : value) {
      if (c == '1') bits |= 1U << count;
      if (c == '0' || c == '1') ++count;
    }
    return static_cast<std::uint8_t>(bits);
  }
  /// [3,2,1,0]
  int of_list(int n) const {
    const auto parts = split(value.substr(1, value.size() - 2), ',');
    return static_cast<int>(number(parts.at(static_cast<std::size_t>(n))));
  }
};

/// BITMASK_PERM's letters: p keeps a bit of the lane's number, i inverts it, 0 and 1 set it.
int bit_mask(std::string_view letters) {
  int and_mask = 0, or_mask = 0, xor_mask = 0;
  for (int b = 0; b < 5; ++b) {
    const int bit = 1 << (4 - b);
    const char letter = letters.at(static_cast<std::size_t>(b) + 1);  // behind a quote
    if (letter == 'p' || letter == 'i') and_mask |= bit;
    if (letter == 'i') xor_mask |= bit;
    if (letter == '1') or_mask |= bit;
  }
  return and_mask | or_mask << 5 | xor_mask << 10;
}
/// swizzle(MODE,...) as the offset that encodes it.
int swizzle(std::string_view text) {
  const auto parts = split(text.substr(8, text.size() - 9), ',');
  const std::string_view mode = parts.at(0);
  const auto arg = [&](std::size_t k) { return static_cast<int>(number(parts.at(k))); };
  if (mode == "QUAD_PERM") return 0x8000 | arg(1) | arg(2) << 2 | arg(3) << 4 | arg(4) << 6;
  if (mode == "SWAP") return arg(1) << 10 | 0x1f;
  if (mode == "REVERSE") return (arg(1) - 1) << 10 | 0x1f;
  if (mode == "BROADCAST") return (32 - arg(1)) | arg(2) << 5;
  if (mode == "BITMASK_PERM") return bit_mask(parts.at(1));
  not_understood("swizzle mode " + std::string(mode));
}

using Parse = void (*)(const Modifier&, Instruction&);
const std::unordered_map<std::string_view, Parse>& plain_modifiers() {
  const auto ignored = [](const Modifier&, Instruction&) {};
  static const std::unordered_map<std::string_view, Parse> table = {
      {"offset",
       [](const Modifier& m, Instruction& i) {
         i.offset = m.value.starts_with("swizzle(") ? swizzle(m.value) : m.n();
       }},
      {"offset0", [](const Modifier& m, Instruction& i) { i.offset = m.n(); }},
      {"offset1", [](const Modifier& m, Instruction& i) { i.offset1 = m.n(); }},
      // How caches are used; of atomics also whether they return what was there.
      {"glc", [](const Modifier&, Instruction& i) { i.returns = true; }},
      {"sc0", [](const Modifier&, Instruction& i) { i.returns = true; }},
      {"th",
       [](const Modifier& m, Instruction& i) {
         if (m.value.find("RETURN") != m.value.npos) i.returns = true;
       }},
      {"slc", ignored},
      {"dlc", ignored},
      {"sc1", ignored},
      {"nt", ignored},
      {"scope", ignored},
      {"nv", ignored},
      {"wait_exp", ignored},
      {"lds", [](const Modifier&, Instruction& i) { i.lds = true; }},
      {"offen", [](const Modifier&, Instruction& i) { i.offen = true; }},
      {"clamp", [](const Modifier&, Instruction& i) { i.clamp = true; }},
      {"mul",
       [](const Modifier& m, Instruction& i) { i.omod = m.n() == 2 ? 1 : 2; }},  // mul:2, mul:4
      {"div", [](const Modifier&, Instruction& i) { i.omod = 3; }},              // div:2
      {"op_sel",
       [](const Modifier& m, Instruction& i) { i.op_sel = m.bits(), i.has_op_sel = true; }},
      {"op_sel_hi", [](const Modifier& m, Instruction& i) { i.op_sel_hi = m.bits(); }},
      {"neg_lo", [](const Modifier& m, Instruction& i) { i.neg_lo = m.bits(); }},
      {"neg_hi", [](const Modifier& m, Instruction& i) { i.neg_hi = m.bits(); }},
      {"neg", [](const Modifier& m, Instruction& i) { i.blgp = m.bits(); }},  // of f64 MFMA
      {"bitop3", [](const Modifier& m, Instruction& i) { i.truth_table = m.byte(); }},
      {"byte_sel", [](const Modifier& m, Instruction& i) { i.byte_sel = m.byte(); }},
      {"cbsz", [](const Modifier& m, Instruction& i) { i.cbsz = m.byte(); }},
      {"abid", [](const Modifier& m, Instruction& i) { i.abid = m.byte(); }},
      {"blgp", [](const Modifier& m, Instruction& i) { i.blgp = m.byte(); }},
  };
  return table;
}

/// Which lane each lane reads; -1: none.
using From = int (*)(const Modifier&, int lane);
const std::unordered_map<std::string_view, From>& lane_moves() {
  static const std::unordered_map<std::string_view, From> table = {
      {"quad_perm", [](const Modifier& m, int l) { return (l & ~3) + m.of_list(l & 3); }},
      {"dpp8", [](const Modifier& m, int l) { return (l & ~7) + m.of_list(l & 7); }},
      {"row_shl", [](const Modifier& m, int l) { return l % 16 + m.n() < 16 ? l + m.n() : -1; }},
      {"row_shr", [](const Modifier& m, int l) { return l % 16 >= m.n() ? l - m.n() : -1; }},
      {"row_ror", [](const Modifier& m, int l) { return (l & ~15) + (l - m.n() + 16) % 16; }},
      {"row_mirror", [](const Modifier&, int l) { return l ^ 15; }},
      {"row_half_mirror", [](const Modifier&, int l) { return l ^ 7; }},
      {"row_newbcast", [](const Modifier& m, int l) { return (l & ~15) + m.n(); }},
      {"row_share", [](const Modifier& m, int l) { return (l & ~15) + m.n(); }},
      {"row_xmask", [](const Modifier& m, int l) { return l ^ m.n(); }},
      {"row_bcast",  // the last lane of the row before (15), of the first half (31)
       [](const Modifier& m, int l) {
         if (m.n() == 31) return l < 32 ? -1 : 31;
         return l < 16 ? -1 : (l & ~15) - 1;
       }},
      {"wave_shl", [](const Modifier&, int l) { return l < 63 ? l + 1 : -1; }},
      {"wave_shr", [](const Modifier&, int l) { return l - 1; }},
      {"wave_rol", [](const Modifier& m, int l) { return (l + 1) % m.wave; }},
      {"wave_ror", [](const Modifier& m, int l) { return (l + m.wave - 1) % m.wave; }},
  };
  return table;
}

bool parse_dpp(const Modifier& m, Instruction& i) {
  static constexpr std::array kOthers = {"row_mask", "bank_mask", "bound_ctrl", "fi"};
  const auto move = lane_moves().find(m.name);
  const bool is_move = move != lane_moves().end();
  if (!is_move && std::find(kOthers.begin(), kOthers.end(), m.name) == kOthers.end()) return false;
  DppControl dpp;
  for (int l = 0; l < 64; ++l) dpp.lane[l] = static_cast<std::int16_t>(l);
  if (i.dpp) dpp = *i.dpp;
  if (is_move)
    for (int l = 0; l < 64; ++l) dpp.lane[l] = static_cast<std::int16_t>(move->second(m, l));
  if (m.name == "dpp8" || m.name == "bound_ctrl") dpp.bound_zero = true;
  if (m.name == "fi") dpp.fetch_inactive = m.n() != 0;
  const bool rows = m.name == "row_mask", banks = m.name == "bank_mask";
  for (int l = 0; (rows || banks) && l < 64; ++l) {
    const bool on = (m.n() >> (rows ? l / 16 : l / 4 % 4) & 1) != 0;
    if (!on) dpp.enabled &= ~(1ULL << l);
  }
  i.dpp = std::make_shared<DppControl>(dpp);
  return true;
}

/// BYTE_2, WORD_1, DWORD.
int part_of(std::string_view text) {
  if (take(text, "BYTE_")) return text[0] - '0';
  if (take(text, "WORD_")) return 4 + text[0] - '0';
  return SdwaControl::kAll;
}
bool parse_sdwa(const Modifier& m, Instruction& i) {
  SdwaControl sdwa;
  if (i.sdwa) sdwa = *i.sdwa;
  if (m.name == "dst_sel") {
    sdwa.dst = part_of(m.value);
  } else if (m.name == "src0_sel") {
    sdwa.src[0] = part_of(m.value);
  } else if (m.name == "src1_sel") {
    sdwa.src[1] = part_of(m.value);
  } else if (m.name == "dst_unused") {
    sdwa.unused = m.value == "UNUSED_SEXT"       ? SdwaControl::kSignExtend
                  : m.value == "UNUSED_PRESERVE" ? SdwaControl::kPreserve
                                                 : SdwaControl::kPad;
  } else {
    return false;
  }
  i.sdwa = std::make_shared<SdwaControl>(sdwa);
  return true;
}

}  // namespace

bool is_modifier(std::string_view word) {
  const std::size_t colon = word.find(':');
  // a[0:3] has a colon, too.
  if (colon != std::string_view::npos && word.find('[') > colon) return true;
  static constexpr std::array kWords = {
      "glc",   "slc",   "dlc",   "sc0", "sc1", "nt",         "lds",
      "offen", "idxen", "clamp", "gds", "nv",  "row_mirror", "row_half_mirror"};
  return std::find(kWords.begin(), kWords.end(), word) != kWords.end();
}

void parse_modifier(std::string_view word, int wave, Instruction& i) {
  const std::size_t colon = word.find(':');
  Modifier m{word, word.substr(0, colon), {}, wave};
  if (colon != std::string_view::npos) m.value = word.substr(colon + 1);
  const auto plain = plain_modifiers().find(m.name);
  if (plain != plain_modifiers().end())
    plain->second(m, i);
  else if (!parse_dpp(m, i) && !parse_sdwa(m, i))
    not_understood("modifier `" + std::string(word) + "`");
}

}  // namespace amdemu
