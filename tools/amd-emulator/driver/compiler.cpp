#include "driver/compiler.hpp"

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <vector>

#include "driver/files.hpp"
#include "machine/settings.hpp"

namespace amdemu {
namespace {

namespace fs = std::filesystem;
constexpr const char* kCacheVersion = "2";  // of what the files of the cache hold

/// The name of a cached file: 128 bits of the text that it was made from.
fs::path cached(const std::string& text) {
  std::error_code ignored;
  fs::create_directories(settings().cache_dir, ignored);
  std::uint64_t a = 0xcbf29ce484222325ULL, b = 0x9e3779b97f4a7c15ULL;
  for (const char each : kCacheVersion + ("\n" + text)) {
    const auto c = static_cast<unsigned char>(each);
    a = (a ^ c) * 0x100000001b3ULL;
    b = (b + c) * 0xff51afd7ed558ccdULL;
    b ^= b >> 29;
  }
  char name[33];
  std::snprintf(name, sizeof(name), "%016llx%016llx", static_cast<unsigned long long>(a),
                static_cast<unsigned long long>(b));
  return fs::path(settings().cache_dir) / name;
}

/// A program of LLVM, in the version that knows the chip unless a variable says otherwise.
std::string tool(const Chip& chip, const std::string& chosen, const std::string& name) {
  return chosen.empty() ? name + "-" + std::to_string(chip.llvm) : chosen;
}

/// Words of a command line, with quotes.
std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  std::string word;
  bool open = false;  // a word has begun
  char quote = 0;
  for (const char c : text + " ") {
    if (quote != 0) {
      if (c == quote)
        quote = 0;
      else
        word += c;
    } else if (c == '"' || c == '\'') {
      quote = c, open = true;
    } else if (c != ' ' && c != '\t' && c != '\n') {
      word += c, open = true;
    } else if (open) {
      words.push_back(word);
      word.clear(), open = false;
    }
  }
  return words;
}

std::vector<std::string> command_of(const Chip& chip, const std::string& options) {
  const std::string folder = (own_folder() / "bitcode").string();
  const std::string bitcode = settings().bitcode.empty() ? folder : settings().bitcode;
  std::vector<std::string> command = {tool(chip, settings().clang, "clang"),
                                      "-x",
                                      "cl",
                                      "-cl-std=CL1.2",
                                      "--target=amdgcn-amd-amdhsa",
                                      std::string("-mcpu=") + chip.gfx,
                                      "-O3",
                                      "--rocm-device-lib-path=" + bitcode};
  if (chip.llvm > 19) {
    // The device libraries are older: no later code object, and a constant that clang has left out
    // since.
    command.insert(command.end(), {"-mcode-object-version=4", "-Xclang", "-mlink-builtin-bitcode",
                                   "-Xclang", bitcode + "/oclc_daz_opt_off.bc"});
  }
  for (const std::string& text : {options, settings().build_options}) {
    for (const std::string& word : words_of(text)) command.push_back(word);
  }
  return command;
}

/// Runs a tool; its messages go to `log`.
bool run_tool(const std::vector<std::string>& command, const TemporaryFolder& folder,
              const std::string& output, const char* variable, std::string& log) {
  const int status = execute(command, folder.path / output, folder.path / "log");
  log += read_file(folder.path / "log");
  if (status == 127) log += command[0] + " was not found (" + variable + ")\n";
  return status == 0;
}

}  // namespace

Compiled disassemble(const Chip& chip, const std::string& binary) {
  Compiled result;
  result.binary = binary;
  const fs::path file = cached(chip.gfx + binary).string() + ".s";
  result.assembly = read_file(file);  // empty: not there
  result.ok = !result.assembly.empty();
  if (result.ok) return result;
  const TemporaryFolder folder;
  const fs::path object = folder.path / "code.o";
  write_file(object, binary);
  const std::vector<std::string> command = {tool(chip, settings().objdump, "llvm-objdump"), "-d",
                                            std::string("--mcpu=") + chip.gfx, object.string()};
  const bool ran = run_tool(command, folder, "code.s", "AMDEMU_OBJDUMP", result.log);
  result.assembly = read_file(folder.path / "code.s");
  result.ok = ran && !result.assembly.empty();
  if (result.ok) write_file(file, result.assembly);
  return result;
}

Compiled compile(const Chip& chip, const std::string& source, const std::string& options) {
  std::vector<std::string> command = command_of(chip, options);
  std::string key = source;
  bool includes = false;  // what is included may change, so it is not cached
  for (const std::string& word : command) {
    key += '\n' + word;
    includes = includes || word.starts_with("-I");
  }
  const std::string base = cached(key).string();
  const std::string known = includes ? std::string() : read_file(base + ".co");
  if (!known.empty()) {
    Compiled result = disassemble(chip, known);
    result.log = read_file(base + ".log") + result.log;
    if (result.ok) return result;
  }
  const TemporaryFolder folder;
  const fs::path program = folder.path / "program.cl", object = folder.path / "program.co";
  write_file(program, source);
  command.insert(command.end(), {"-o", object.string(), program.string()});
  std::string log;
  if (!run_tool(command, folder, "out", "AMDEMU_CLANG", log)) {
    Compiled failed;
    failed.log = log.empty() ? "clang failed\n" : log;
    return failed;
  }
  Compiled result = disassemble(chip, read_file(object));
  if (result.ok && !includes) {
    write_file(base + ".log", log);
    write_file(base + ".co", result.binary);
  }
  result.log = log + result.log;
  return result;
}

}  // namespace amdemu
