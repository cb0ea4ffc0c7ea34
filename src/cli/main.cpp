#include <fmt/format.h>

#include <clattn/error.hpp>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "cli/commands.hpp"
#include "cli/common/error.hpp"
#include "files/files.hpp"

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

enum Status : int {
  kFailed = 1,       ///< a check or verification failed
  kMalformed = 2,    ///< the input is wrong or asks for something impossible
  kUnsupported = 3,  ///< valid, but this backend or device cannot do it
  kOpenCL = 4,       ///< the driver said no
};

int status_of(ErrorCode code) {
  if (code == ErrorCode::kInvalidArgument || code == ErrorCode::kIo) return kMalformed;
  if (code == ErrorCode::kUnsupported) return kUnsupported;
  return code == ErrorCode::kOpenCL ? kOpenCL : kFailed;
}

/// Whatever the message holds (a build log, bytes of a hostile file), one printable line comes out.
int complain(std::string_view message, int status) {
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

/// `status`, unless something printed before has not reached standard output.
int flushed(int status) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return status;
  return complain("standard output: cannot be written", kMalformed);
}

int run(int argc, char** argv) {
  CLI::App app{"CLAttn: paged attention for every OpenCL device", "clattn"};
  app.set_version_flag("--version", CLATTN_VERSION);
  app.require_subcommand(1);
  for (auto* const add : {add_devices_command, add_check_command, add_fuzz_command, add_run_command,
                          add_replay_command, add_bench_command, add_tune_command}) {
    add(app);
  }
  try {
    app.parse(argc, argv);
    return flushed(0);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return flushed(app.exit(error));  // --help, --version
    const std::vector<std::string> rest = app.remaining();
    if (app.get_subcommands().empty() && !rest.empty()) {
      return complain(fmt::format("{}: unknown command; see clattn --help", rest.front()),
                      kMalformed);
    }
    return complain(error.what(), kMalformed);
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
}  // namespace clattn::cli

int main(int argc, char** argv) {
  using namespace clattn::cli;  // NOLINT(google-build-using-namespace): this is the program
  try {
    return run(argc, argv);
  } catch (const ExitCode& code) {
    return code.value;
  } catch (const clattn::Error& error) {
    return complain(error.what(), status_of(error.code()));
  } catch (const nlohmann::json::exception& error) {
    return complain(error.what(), kMalformed);
  } catch (const std::system_error& error) {  // of a file system, or of printing
    return complain(error.what(), kMalformed);
  } catch (const std::bad_alloc&) {
    return complain("not enough host memory for what was asked", kMalformed);
  } catch (const std::length_error&) {
    return complain("a size that was asked for exceeds what the host can hold", kMalformed);
  } catch (const std::exception& error) {
    return complain(error.what(), kFailed);
  } catch (...) {
    return complain("unknown failure", kFailed);
  }
}
