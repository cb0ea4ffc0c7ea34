#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/error.hpp>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <new>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "files/files.hpp"
#include "program/commands.hpp"
#include "program/common/error.hpp"
#include "program/common/text.hpp"

namespace clattn::cli {

namespace {

/// Whether output replaces the file in one step, so that an interrupted run leaves the old one
/// intact. Pipes, devices and links are written to in place.
bool is_replaced(const std::string& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::symlink_status(path, error);
  return std::filesystem::is_regular_file(status) || !std::filesystem::exists(status);
}

[[noreturn]] void throw_unwritable(const std::string& path) {
  throw_io("{}: cannot be written", path);
}

/// What the exit codes mean, for every command.
constexpr std::pair<Status, std::string_view> kStatuses[] = {
    {Status::kDone, "done, and all of it was right"},
    {Status::kFailed, "a check or comparison failed, or a part of the work could not be done"},
    {Status::kMalformed, "the command line, a file or a value in it is wrong"},
    {Status::kUnsupported, "valid, but this device or backend cannot do it"},
    {Status::kOpenCL, "OpenCL failed, or has no device"},
};

/// The table as every --help ends with it.
std::string exit_codes() {
  std::string text = "Exit codes:";
  for (const auto& [status, meaning] : kStatuses)
    text += fmt::format("\n  {}  {}", static_cast<int>(status), meaning);
  return text;
}

Status status_of(ErrorCode code) {
  if (code == ErrorCode::kInvalidArgument || code == ErrorCode::kIo) return Status::kMalformed;
  if (code == ErrorCode::kUnsupported) return Status::kUnsupported;
  return code == ErrorCode::kOpenCL ? Status::kOpenCL : Status::kFailed;
}

/// Whatever the message holds (a build log, bytes of a hostile file), one printable line comes out.
Status complain(std::string_view message, Status status) {
  constexpr std::size_t kMostBytes = 1 << 14;  // a build log's; a file may be quoted at any length
  std::string line = "clattn: ";
  const bool cut = message.size() > kMostBytes;
  if (cut) message = message.substr(0, kMostBytes);
  for (const char c : message) {
    if (c == '\n') {
      line += " | ";
    } else {
      line += static_cast<unsigned char>(c) < 0x20 || c == 0x7F ? ' ' : c;
    }
  }
  line.erase(line.find_last_not_of(" |") + 1);
  line += cut ? " ...\n" : "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
  return status;
}

/// kDone, unless something printed before has not reached standard output.
Status flushed() {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return Status::kDone;
  return complain("standard output: cannot be written", Status::kMalformed);
}

/// Throws unless the program has a command of this name.
void check_command(const CLI::App& app, const std::string& name) {
  const std::vector<std::string> names = names_of(
      app.get_subcommands({}), [](const CLI::App* command) { return command->get_name(); });
  if (std::ranges::find(names, name) != names.end()) return;
  const std::string nearest = nearest_name(name, names);
  throw_invalid("{}: unknown command{}; legal: {}", name,
                nearest.empty() ? "" : fmt::format(", is it {}?", nearest), fmt::join(names, ", "));
}

/// For the list of commands: parsed_arguments() makes an option of it.
void add_help_command(CLI::App& app) {
  app.add_subcommand("help", "Describe a command, or list all: help [COMMAND]");
}

/// The command line as CLI11 takes it, from its end: `help COMMAND` is `COMMAND --help`, because
/// the command's name would start that command, and nothing is `help`.
std::vector<std::string> parsed_arguments(const CLI::App& app, std::span<char*> given) {
  std::vector<std::string> arguments(given.begin(), given.end());
  if (arguments.empty()) arguments = {"help"};
  if (arguments.front() == "help" && (arguments.size() == 1 || !arguments[1].starts_with('-'))) {
    arguments.erase(arguments.begin());
    if (!arguments.empty()) check_command(app, arguments.front());
    arguments.emplace_back("--help");
  }
  std::ranges::reverse(arguments);
  return arguments;
}

Status run(int argc, char** argv) {
  CLI::App app{"CLAttn: paged attention for every OpenCL device", "clattn"};
  app.set_version_flag("--version", CLATTN_VERSION);
  app.footer(exit_codes());
  for (auto* const add : {add_devices_command, add_explain_command, add_options_command,
                          add_check_command, add_fuzz_command, add_run_command, add_replay_command,
                          add_bench_command, add_tune_command, add_help_command}) {
    add(app);
  }
  try {
    app.parse(parsed_arguments(app, std::span(argv, to_size(argc)).subspan(argc > 0 ? 1 : 0)));
    return flushed();
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {  // --help, --version
      app.exit(error);
      return flushed();
    }
    const std::vector<std::string> rest = app.remaining();
    if (app.get_subcommands().empty() && !rest.empty()) check_command(app, rest.front());
    return complain(error.what(), Status::kMalformed);
  }
}

}  // namespace

void write_text(const std::string& path, const std::string& text) {
  if (path == "-") {
    const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
    if (!written || std::fflush(stdout) != 0) throw_unwritable("standard output");
    return;
  }
  if (is_replaced(path)) return files::replace_file(path, text);
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) throw_unwritable(path);
}

void check_writable(const std::string& path) {
  std::error_code error;
  const bool exists = std::filesystem::exists(path, error);
  const bool named = exists || std::filesystem::is_symlink(path, error);
  // A pipe's reader would take the trial for the end.
  if (path == "-" || (exists && !std::filesystem::is_regular_file(path, error) &&
                      !std::filesystem::is_directory(path, error))) {
    return;
  }
  const bool opens = std::ofstream(path, std::ios::binary | std::ios::app).is_open();
  if (opens && !named) std::filesystem::remove(path, error);
  if (!opens) throw_unwritable(path);
  if (is_replaced(path)) const files::PendingFile trial(path);
}

namespace {

/// Runs the program; of what it throws one line comes out.
Status run_and_complain(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const ExitCode& code) {
    return code.status;
  } catch (const Error& error) {
    return complain(error.what(), status_of(error.code()));
  } catch (const nlohmann::json::exception& error) {
    return complain(error.what(), Status::kMalformed);
  } catch (const std::system_error& error) {  // of a file system, or of printing
    return complain(error.what(), Status::kMalformed);
  } catch (const std::bad_alloc&) {
    return complain("not enough host memory for what was asked", Status::kMalformed);
  } catch (const std::length_error&) {
    return complain("a size that was asked for exceeds what the host can hold", Status::kMalformed);
  } catch (const std::exception& error) {
    return complain(error.what(), Status::kFailed);
  } catch (...) {
    return complain("unknown failure", Status::kFailed);
  }
}

}  // namespace
}  // namespace clattn::cli

int main(int argc, char** argv) {
  return static_cast<int>(clattn::cli::run_and_complain(argc, argv));
}
