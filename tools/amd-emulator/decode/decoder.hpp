// From llvm-objdump's text of an instruction to one that can run. One parser for all generations.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "exec/table.hpp"
#include "machine/chips.hpp"
#include "machine/instruction.hpp"

namespace amdemu {

class Decoder {
 public:
  Decoder(const Chip& chip, int wave)
      : chip_(chip), wave_(wave), table_(table_of(wave)), handlers_(handlers_of(wave)) {}

  /// Throws std::runtime_error at what it does not understand.
  Instruction decode(std::string_view text) const;

 private:
  Instruction dual_issued(std::string_view text, std::size_t separator) const;
  void from_table(const std::string& name, const Entry& entry, const std::vector<Operand>& operands,
                  Instruction& i) const;

  const Chip& chip_;
  int wave_;
  const Table& table_;
  const Handlers& handlers_;
};

// The parts, each in a file of its own.
Operand parse_operand(std::string_view text);
bool is_modifier(std::string_view word);
void parse_modifier(std::string_view word, int wave, Instruction& i);
void decode_matrix(const std::string& name, const Chip& chip, const std::vector<Operand>& operands,
                   Instruction& i);
/// Loads, stores and atomics of every generation; false: none of these.
bool decode_memory(const std::string& name, const std::vector<Operand>& operands,
                   const Handlers& handlers, Instruction& i);

}  // namespace amdemu
