#include "decode/decoder.hpp"

#include <array>

#include "decode/text.hpp"
#include "machine/wave.hpp"

namespace amdemu {
namespace {

bool is_one_of(std::string_view name, std::initializer_list<std::string_view> prefixes) {
  for (const std::string_view prefix : prefixes) {
    if (name.starts_with(prefix)) return true;
  }
  return false;
}

/// hwreg(HW_REG_MODE, 4, 2)
HardwareRegister hardware_register(std::string_view text) {
  const auto parts = split(text.substr(6, text.size() - 7), ',');
  HardwareRegister part;
  if (parts.at(0) == "HW_REG_MODE" || parts[0] == "HW_REG_WAVE_MODE")
    part.id = HardwareRegister::kMode;
  if (parts[0].starts_with("HW_REG_HW_ID")) part.id = HardwareRegister::kHardwareId;
  if (parts.size() > 2) {
    part.shift = static_cast<std::uint8_t>(number(parts[1]));
    part.size = static_cast<std::uint8_t>(number(parts[2]));
  }
  return part;
}

/// The mnemonic without the suffix of its encoding.
std::string name_of(std::string_view mnemonic) {
  for (const std::string_view suffix : {"_e64_dpp", "_dpp", "_sdwa", "_e32", "_e64"}) {
    if (!mnemonic.ends_with(suffix)) continue;
    mnemonic.remove_suffix(suffix.size());
    break;
  }
  return std::string(mnemonic);
}

/// Reading null yields 0.
void read_null_as_zero(Instruction& i) {
  for (int k = 0; k < i.num_src; ++k) {
    Operand& o = i.src[k];
    if (o.kind == Operand::kSgpr && o.reg == kNullSink) o.kind = Operand::kImmediate, o.imm = 0;
  }
}

/// Immediates of 16 bits are printed without their sign.
void extend_signs(const std::string& name, Instruction& i) {
  const bool is_signed = is_one_of(name, {"s_movk_", "s_addk_", "s_mulk_", "s_cmovk_"}) ||
                         (name.starts_with("s_cmpk_") && name.ends_with("_i32"));
  for (int k = 0; is_signed && k < i.num_src; ++k) {
    Operand& o = i.src[k];
    if (o.kind != Operand::kImmediate) continue;
    o.imm = static_cast<std::uint32_t>(std::int32_t{static_cast<std::int16_t>(o.imm)});
  }
}

/// Branches (their targets come from the encoding), waits and hints: their operands are not read.
bool without_operands(const std::string& name, const Entry& entry) {
  return entry.num_dst == 0 && name.starts_with("s_") &&
         !is_one_of(name,
                    {"s_cmp", "s_bitcmp", "s_setpc", "s_setreg", "s_denorm_mode", "s_round_mode"});
}

}  // namespace

Instruction Decoder::dual_issued(std::string_view text, std::size_t separator) const {
  Instruction first = decode(trim(text.substr(0, separator)));
  first.second = std::make_shared<Instruction>(decode(trim(text.substr(separator + 2))));
  first.inner = first.handler;
  first.handler = handlers_.dual;
  first.text = std::string(text);
  return first;
}

Instruction Decoder::decode(std::string_view text) const {
  if (const std::size_t at = text.find("::"); at != text.npos) return dual_issued(text, at);
  Instruction i;
  i.text = std::string(text);
  const std::size_t blank = text.find(' ');
  std::string name = name_of(text.substr(0, blank));
  const std::string_view rest = blank == text.npos ? std::string_view() : text.substr(blank);
  if (name.starts_with("v_dual_")) name = "v_" + name.substr(7);
  const Entry* entry = table_.find(name);
  if (entry != nullptr && without_operands(name, *entry)) {
    i.handler = entry->handler;
    i.is_branch = is_one_of(name, {"s_branch", "s_cbranch"});
    return i;
  }
  // Operands, the last with modifiers behind it.
  std::vector<Operand> operands;
  for (const std::string_view piece : split(rest, ',')) {
    bool is_first = true;
    for (const std::string_view word : split(piece, ' ')) {
      if (!is_first || is_modifier(word))
        parse_modifier(word, wave_, i);
      else if (word.starts_with("hwreg("))
        i.hardware = hardware_register(word);
      else
        operands.push_back(parse_operand(word));
      is_first = false;
    }
  }
  if (is_one_of(name, {"v_fma_mix", "v_mad_mix"}) && rest.find("op_sel_hi") == rest.npos)
    i.op_sel_hi = 0;  // whole registers; of other packed instructions the default is the high half

  if (is_one_of(name, {"v_mfma_", "v_wmma_"})) {
    decode_matrix(name, chip_, operands, i);
    i.handler = handlers_.matrix;
  } else if (entry != nullptr) {
    from_table(name, *entry, operands, i);
  } else if (!decode_memory(name, operands, handlers_, i)) {
    not_understood("instruction `" + name + "` is not emulated");
  }
  read_null_as_zero(i);
  return i;
}

void Decoder::from_table(const std::string& name, const Entry& entry,
                         const std::vector<Operand>& operands, Instruction& i) const {
  int num_dst = entry.num_dst;
  if (num_dst < 0) num_dst = operands.size() > 2 ? 1 : 0;
  i.num_dst = static_cast<std::uint8_t>(num_dst);
  for (std::size_t n = 0; n < operands.size(); ++n) {
    if (n < i.num_dst)
      i.dst[n] = operands[n];
    else if (i.num_src < 5)
      i.src[i.num_src++] = operands[n];
  }
  extend_signs(name, i);
  if (entry.accumulates) i.src[i.num_src++] = i.dst[0];
  i.handler = entry.handler;
  if (i.dpp || i.sdwa) {
    i.inner = i.handler;
    i.handler = i.dpp ? handlers_.dpp : handlers_.sdwa;
  }
}

}  // namespace amdemu
