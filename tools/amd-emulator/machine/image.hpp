// A loaded code object: its kernels and their decoded instructions.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "machine/chips.hpp"
#include "machine/instruction.hpp"

namespace amdemu {

struct KernelArg {
  std::string kind, name, type_name, address_space;
  std::uint32_t offset = 0, size = 0;
  bool is_const = false, is_restrict = false, is_volatile = false;
  bool is_hidden() const { return kind.starts_with("hidden_"); }
};
struct Kernel {
  std::string name;
  std::vector<KernelArg> args;  // the hidden ones come last
  std::uint32_t local_bytes = 0, private_bytes = 0, kernarg_bytes = 0;
  std::uint32_t max_group = 256, reqd_group[3] = {0, 0, 0};
  std::uint32_t rsrc1 = 0, rsrc2 = 0, properties = 0;  // of the kernel descriptor
  std::uint64_t entry = 0;                             // address in this process
  bool dynamic_stack = false;
  bool is_wave32() const { return (properties >> 10 & 1) != 0; }
};
struct Image {
  Image() = default;
  Image(const Image&) = delete;
  Image& operator=(const Image&) = delete;
  ~Image();

  const Chip* chip = nullptr;
  unsigned char* base = nullptr;  // where it is loaded
  std::size_t size = 0;
  std::uint64_t text_begin = 0, text_end = 0;  // addresses in this process
  std::vector<Instruction> code;
  std::vector<std::int32_t> index_of;  // (address - text_begin) / 4 -> index in code, or -1
  std::vector<Kernel> kernels;

  const Kernel* find(std::string_view name) const;
  /// Of the instruction at an address of this process; -1: none begins there.
  std::int32_t index_at(std::uint64_t address) const {
    if (address < text_begin || address >= text_end) return -1;
    return index_of[(address - text_begin) / 4];
  }
};

/// `assembly`: llvm-objdump's disassembly of `elf`. Throws std::runtime_error.
std::shared_ptr<Image> load_image(const Chip& chip, const std::string& elf,
                                  const std::string& assembly);

}  // namespace amdemu
