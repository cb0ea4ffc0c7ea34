// Loads a code object as AMD's runtime does, and decodes its disassembly.
#include <elf.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <unordered_map>

#include "decode/decoder.hpp"
#include "decode/metadata.hpp"
#include "decode/text.hpp"
#include "machine/image.hpp"
#include "machine/ranges.hpp"
#include "machine/settings.hpp"
#include "machine/wave.hpp"

namespace amdemu {
namespace {

class Elf {
 public:
  explicit Elf(const std::string& file) : file_(file) {
    if (file.size() < sizeof(Elf64_Ehdr) || std::memcmp(file.data(), ELFMAG, SELFMAG) != 0)
      throw std::runtime_error("not an ELF file");
  }
  /// `count` records that begin at an offset of the file.
  template <class T>
  std::span<const T> at(std::uint64_t offset, std::uint64_t count) const {
    if (offset > file_.size() || count > (file_.size() - offset) / sizeof(T))
      throw std::runtime_error("the code object ends early");
    return {reinterpret_cast<const T*>(file_.data() + offset), count};
  }
  const Elf64_Ehdr& header() const { return at<Elf64_Ehdr>(0, 1)[0]; }
  std::span<const Elf64_Phdr> segments() const {
    return at<Elf64_Phdr>(header().e_phoff, header().e_phnum);
  }
  std::span<const Elf64_Shdr> sections() const {
    return at<Elf64_Shdr>(header().e_shoff, header().e_shnum);
  }
  template <class T>
  std::span<const T> content(const Elf64_Shdr& section) const {
    return at<T>(section.sh_offset, section.sh_size / sizeof(T));
  }
  std::string string(std::uint32_t table, std::uint32_t offset) const {
    const auto chars = content<char>(sections()[table]).subspan(offset);
    return {chars.begin(), std::find(chars.begin(), chars.end(), '\0')};
  }

 private:
  const std::string& file_;
};

void load_segments(const Elf& elf, Image& image) {
  for (const Elf64_Phdr& s : elf.segments()) {
    if (s.p_type == PT_LOAD) image.size = std::max(image.size, s.p_vaddr + s.p_memsz);
  }
  void* memory =
      mmap(nullptr, image.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("out of memory");
  image.base = static_cast<unsigned char*>(memory);
  register_range(image.base, image.size);
  for (const Elf64_Phdr& s : elf.segments()) {
    const auto bytes = elf.at<unsigned char>(s.p_offset, s.p_filesz);
    if (s.p_type == PT_LOAD) std::copy(bytes.begin(), bytes.end(), image.base + s.p_vaddr);
    if (s.p_type != PT_NOTE) continue;
    const auto& note = elf.at<Elf64_Nhdr>(s.p_offset, 1)[0];
    const std::uint64_t name_bytes = (note.n_namesz + 3) & ~3U;
    image.kernels = read_kernels(bytes.subspan(sizeof(note) + name_bytes, note.n_descsz));
  }
}

/// The descriptor of kernel K is the symbol K.kd.
void read_descriptors(const Elf& elf, const Elf64_Shdr& symbols, Image& image) {
  for (const Elf64_Sym& symbol : elf.content<Elf64_Sym>(symbols)) {
    const std::string name = elf.string(symbols.sh_link, symbol.st_name);
    for (Kernel& kernel : image.kernels) {
      if (name != kernel.name + ".kd") continue;
      const unsigned char* descriptor = image.base + symbol.st_value;
      std::int64_t entry = 0;
      std::uint16_t properties = 0;
      std::memcpy(&entry, descriptor + 16, sizeof(entry));
      std::memcpy(&kernel.rsrc1, descriptor + 48, sizeof(kernel.rsrc1));
      std::memcpy(&kernel.rsrc2, descriptor + 52, sizeof(kernel.rsrc2));
      std::memcpy(&properties, descriptor + 56, sizeof(properties));
      kernel.properties = properties;
      kernel.entry =
          reinterpret_cast<std::uint64_t>(descriptor) + static_cast<std::uint64_t>(entry);
    }
  }
}

void relocate(const Elf& elf, const Elf64_Shdr& relocations, Image& image) {
  constexpr std::uint32_t kRelative64 = 13;  // R_AMDGPU_RELATIVE64
  for (const Elf64_Rela& each : elf.content<Elf64_Rela>(relocations)) {
    if (ELF64_R_TYPE(each.r_info) != kRelative64)
      throw std::runtime_error("relocation of a kind that is not supported");
    const std::uint64_t value =
        reinterpret_cast<std::uint64_t>(image.base) + static_cast<std::uint64_t>(each.r_addend);
    std::memcpy(image.base + each.r_offset, &value, sizeof(value));
  }
}

void read_sections(const Elf& elf, Image& image) {
  for (const Elf64_Shdr& s : elf.sections()) {
    if (elf.string(elf.header().e_shstrndx, s.sh_name) == ".text") {
      image.text_begin = reinterpret_cast<std::uint64_t>(image.base) + s.sh_addr;
      image.text_end = image.text_begin + s.sh_size;
    }
    if (s.sh_type == SHT_DYNSYM) read_descriptors(elf, s, image);
    if (s.sh_type == SHT_RELA) relocate(elf, s, image);
  }
}

void stop_at_unknown(Wave&, const Instruction& i) {
  throw Fault{i.text};
}

/// What is not understood is an error only where it is reached.
Instruction decoded(const Decoder& decoder, const Chip& chip, const std::string& text) {
  try {
    return decoder.decode(text);
  } catch (const std::exception& failure) {
    if (settings().verbose != 0)
      std::fprintf(stderr, "amdemu: %s: %s: %s\n", chip.gfx, failure.what(), text.c_str());
    Instruction unknown;
    unknown.handler = &stop_at_unknown;
    unknown.text = std::string(failure.what()) + " (`" + text + "`)";
    return unknown;
  }
}

/// A line of llvm-objdump: a tab, the instruction, "// ", the address, a colon, the encoding's
/// words, perhaps a branch's target in angle brackets.
struct Line {
  std::string text;
  std::uint64_t address = 0;
  std::uint32_t size = 0, first_word = 0;

  static bool parse(std::string_view line, Line& result) {
    const std::size_t comment = line.find("// ");
    if (!line.starts_with('\t') || comment == line.npos) return false;
    result.text = trim(line.substr(0, comment));
    const std::string_view encoding = line.substr(comment + 3);
    const std::size_t colon = encoding.find(':');
    if (colon == encoding.npos) return false;
    const auto hexadecimal = [](std::string_view digits) {
      return std::strtoull(std::string(digits).c_str(), nullptr, 16);
    };
    result.address = hexadecimal(encoding.substr(0, colon));
    const auto words = trim(encoding.substr(colon + 1, encoding.find('<') - colon - 1));
    result.size = static_cast<std::uint32_t>((words.size() + 1) / 9 * 4);  // 8 digits and a blank
    result.first_word = static_cast<std::uint32_t>(hexadecimal(words.substr(0, 8)));
    return true;
  }
};

void decode_text(const Chip& chip, int wave, const std::string& assembly, Image& image) {
  const Decoder decoder(chip, wave);
  const auto base = reinterpret_cast<std::uint64_t>(image.base);
  image.index_of.assign((image.text_end - image.text_begin) / 4 + 1, -1);
  std::unordered_map<std::string, Instruction> seen;
  std::vector<std::uint64_t> targets;  // of each instruction; 0: no branch
  for (std::size_t at = 0; at < assembly.size();) {
    const std::size_t end = std::min(assembly.find('\n', at), assembly.size());
    Line line;
    const bool is_code = Line::parse(std::string_view(assembly).substr(at, end - at), line);
    at = end + 1;
    if (!is_code) continue;
    auto known = seen.find(line.text);
    if (known == seen.end())
      known = seen.emplace(line.text, decoded(decoder, chip, line.text)).first;
    Instruction i = known->second;
    i.address = base + line.address;
    i.size = line.size;
    const auto words_ahead = static_cast<std::int16_t>(line.first_word & 0xffff);
    targets.push_back(i.is_branch ? i.address + 4 + static_cast<std::uint64_t>(4 * words_ahead)
                                  : 0);
    if (i.address >= image.text_begin && i.address < image.text_end)
      image.index_of[(i.address - image.text_begin) / 4] =
          static_cast<std::int32_t>(image.code.size());
    image.code.push_back(std::move(i));
  }
  for (std::size_t n = 0; n < targets.size(); ++n)
    image.code[n].target = image.index_at(targets[n]);
}

}  // namespace

Image::~Image() {
  if (base == nullptr) return;
  forget_range(base);
  munmap(base, size);
}

const Kernel* Image::find(std::string_view name) const {
  for (const Kernel& kernel : kernels) {
    if (kernel.name == name) return &kernel;
  }
  return nullptr;
}

std::shared_ptr<Image> load_image(const Chip& chip, const std::string& elf,
                                  const std::string& assembly) {
  auto image = std::make_shared<Image>();
  image->chip = &chip;
  const Elf file(elf);
  load_segments(file, *image);
  read_sections(file, *image);
  const bool wave64 =
      chip.wave == 64 || (!image->kernels.empty() && !image->kernels[0].is_wave32());
  decode_text(chip, wave64 ? 64 : 32, assembly, *image);
  return image;
}

}  // namespace amdemu
