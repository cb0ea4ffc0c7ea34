#include "driver/files.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "machine/settings.hpp"

extern char** environ;

namespace amdemu {
namespace fs = std::filesystem;

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void write_file(const fs::path& path, const std::string& content) {
  static std::atomic<unsigned> serial{0};
  const std::string suffix = "." + std::to_string(getpid()) + "." + std::to_string(serial++);
  const fs::path temporary = path.string() + suffix;
  std::ofstream(temporary, std::ios::binary) << content;
  std::error_code ignored;
  fs::rename(temporary, path, ignored);
}

int execute(const std::vector<std::string>& arguments, const fs::path& output,
            const fs::path& errors) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, output.c_str(), kFlags, 0644);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, errors.c_str(), kFlags, 0644);
  pid_t child = 0;
  const int failed = posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) return 127;
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

fs::path own_folder() {
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(&own_folder), &info);
  std::error_code ignored;
  return fs::weakly_canonical(fs::path(info.dli_fname), ignored).parent_path();
}

TemporaryFolder::TemporaryFolder() {
  std::string name = (fs::temp_directory_path() / "amdemu-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder: " + name);
  path = name;
}
TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  if (!settings().keep) fs::remove_all(path, ignored);
}

}  // namespace amdemu
