#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <clattn/error.hpp>
#include <filesystem>
#include <fstream>
#include <map>

#include "opencl/program/source.hpp"

namespace clattn::detail {
namespace {

using Files = std::map<std::string, std::string>;

FlatSource flatten(const Files& files, const std::string& root = "main.cl") {
  return flatten_source(root, [&](const std::string& path) -> std::optional<std::string> {
    const auto found = files.find(path);
    if (found == files.end()) return std::nullopt;
    return found->second;
  });
}

std::string error_of(const Files& files, ErrorCode code) {
  try {
    flatten(files);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

// "file:line" of the line of the flat text that reads `wanted`.
std::string origin_of(const FlatSource& source, const std::string& wanted) {
  std::size_t begin = 0;
  for (const FlatSource::Origin& origin : source.lines) {
    const std::size_t end = source.text.find('\n', begin);
    if (source.text.substr(begin, end - begin) == wanted) {
      return source.files[origin.file] + ":" + std::to_string(origin.line);
    }
    begin = end + 1;
  }
  return "no such line";
}

const Files kTree = {{"main.cl", "// head\n#include \"lib/a.clh\"\nint main_line;\n"},
                     {"lib/a.clh", "int a_line;\n  #  include \"b.clh\"  // beside it\nint a_end;"},
                     {"lib/b.clh", "#include \"shared/s.h\"\n\nint b_line;\n"},
                     {"shared/s.h", "int s_line;\n"}};

TEST(Flattening, EveryLineKnowsItsOrigin) {
  const FlatSource source = flatten(kTree);
  EXPECT_EQ(origin_of(source, "int main_line;"), "main.cl:3");
  EXPECT_EQ(origin_of(source, "int a_line;"), "lib/a.clh:1");
  EXPECT_EQ(origin_of(source, "int a_end;"), "lib/a.clh:3");
  EXPECT_EQ(origin_of(source, "int b_line;"), "lib/b.clh:3");
  EXPECT_EQ(origin_of(source, "int s_line;"), "shared/s.h:1");
  EXPECT_EQ(std::count(source.text.begin(), source.text.end(), '\n'),
            static_cast<std::ptrdiff_t>(source.lines.size()));
  EXPECT_EQ(source.text.find("#include"), std::string::npos);
}

TEST(Flattening, RepeatedIncludesShareOneGuard) {
  const FlatSource source =
      flatten({{"main.cl", "#include \"a.clh\"\n#include \"a.clh\"\n"}, {"a.clh", "int once;\n"}});
  EXPECT_EQ(source.text,
            "#ifndef CLA_INCLUDED_1\n#define CLA_INCLUDED_1\nint once;\n#endif\n"
            "#ifndef CLA_INCLUDED_1\n#define CLA_INCLUDED_1\nint once;\n#endif\n");
}

// Kernels are written for any unit, and include the one that their variant names.
TEST(Flattening, AUnitIsTheOneThatWasAskedFor) {
  const Files files = {{"main.cl", "#include \"tile/unit.clh\"\n"},
                       {"tile/a.clh", "int a;\n"},
                       {"tile/b.clh", "int b;\n"}};
  const auto read = [&](const std::string& path) -> std::optional<std::string> {
    const auto file = files.find(path);
    return file == files.end() ? std::nullopt : std::optional(file->second);
  };
  EXPECT_NE(flatten_source("main.cl", read, "tile/a.clh").text.find("int a;"), std::string::npos);
  const FlatSource other = flatten_source("main.cl", read, "tile/b.clh");
  EXPECT_NE(other.text.find("int b;"), std::string::npos);
  EXPECT_EQ(other.text.find("int a;"), std::string::npos);
  EXPECT_THROW(flatten_source("main.cl", read), clattn::Error);
}

TEST(Flattening, CommentsAndSystemIncludesAreLeftAlone) {
  const std::string text =
      "/* usage:\n#include \"nothing.clh\"\n*/\n// #include \"nothing.clh\"\n"
      "#include <system.h>\nchar* s = \"/*\";\n#include \"a.clh\"\n";
  const FlatSource source = flatten({{"main.cl", text}, {"a.clh", "int a;\n"}});
  EXPECT_EQ(origin_of(source, "int a;"), "a.clh:1");
  EXPECT_EQ(origin_of(source, "#include \"nothing.clh\""), "main.cl:2");
  EXPECT_EQ(origin_of(source, "#include <system.h>"), "main.cl:5");
}

TEST(Flattening, TheIncludersFolderComesFirst) {
  const FlatSource source = flatten({{"main.cl", "#include \"lib/a.clh\"\n"},
                                     {"lib/a.clh", "#include \"c.clh\"\n"},
                                     {"lib/c.clh", "int near;\n"},
                                     {"c.clh", "int far;\n"}});
  EXPECT_EQ(origin_of(source, "int near;"), "lib/c.clh:1");
  EXPECT_EQ(origin_of(source, "int far;"), "no such line");
}

TEST(Flattening, MissingFilesAreNamed) {
  EXPECT_EQ(error_of({}, ErrorCode::kIo), "kernel file 'main.cl' not found");
  EXPECT_EQ(error_of({{"main.cl", "\n#include \"lib/x.clh\"\n"}}, ErrorCode::kIo),
            "main.cl:2: included kernel file 'lib/x.clh' not found");
}

TEST(Flattening, CyclesAreNamed) {
  EXPECT_EQ(error_of({{"main.cl", "#include \"a.clh\"\n"},
                      {"a.clh", "\n#include \"b.clh\"\n"},
                      {"b.clh", "#include \"a.clh\"\n"}},
                     ErrorCode::kInvalidArgument),
            "b.clh:1: kernel files include one another in a cycle: a.clh -> b.clh -> a.clh");
}

TEST(BuildLog, PositionsOfEveryDriverBecomeOurs) {
  const FlatSource source = flatten(kTree);
  // Line 4 of the flat text is `int a_line;`: head, ifndef, define, then lib/a.clh.
  ASSERT_EQ(origin_of(source, "int a_line;"), "lib/a.clh:1");
  const struct {
    std::string_view log;
    std::string_view expected;
  } rows[] = {
      {"<kernel>:4:40: error: x", "lib/a.clh:1:40: error: x"},
      {"1:4:40: error: x", "lib/a.clh:1:40: error: x"},
      {"/tmp/comgr-4f/input/CompileSource:4:40: error: x", "lib/a.clh:1:40: error: x"},
      {"input.cl:4:40: error: x", "lib/a.clh:1:40: error: x"},
      {"<program source>:4:40: error: x", "lib/a.clh:1:40: error: x"},
      {"error: /root/.cache/pocl/kcache/tempfile_Yk.cl:4:40: x", "error: lib/a.clh:1:40: x"},
      {"C:\\Temp\\a.cl:4:40: error: x", "lib/a.clh:1:40: error: x"},
      {"two\n<kernel>:1:2: warning: y\n<kernel>:4:3: note: z\n",
       "two\nmain.cl:1:2: warning: y\nlib/a.clh:1:3: note: z\n"},
      {"(<source>:4:7)", "(lib/a.clh:1:7)"},
      // No position of ours: beyond the text, in a header, a clock, a line without column.
      {"<kernel>:999:1: error", "<kernel>:999:1: error"},
      {"/usr/lib/opencl-c.h:4:40: note: candidate", "/usr/lib/opencl-c.h:4:40: note: candidate"},
      {"built at 12:04:05", "built at 12:04:05"},
      {"ptxas application ptx input, line 4; error", "ptxas application ptx input, line 4; error"},
      {"<kernel>:4: x", "<kernel>:4: x"},
      {":4:40: x", ":4:40: x"},
      {"<kernel>:0:1 <kernel>:99999999999999999999999:1",
       "<kernel>:0:1 <kernel>:99999999999999999999999:1"},
      {"", ""},
  };
  for (const auto& row : rows) EXPECT_EQ(rewrite_build_log(row.log, source), row.expected);
}

TEST(KernelFiles, EmbeddedFilesAreByteExact) {
  ASSERT_FALSE(embedded_kernels().empty());
  for (const EmbeddedFile& file : embedded_kernels()) {
    std::ifstream stream(std::filesystem::path(CLATTN_SOURCE_DIR) / "kernels_cl" / file.path,
                         std::ios::binary);
    const std::string expected{std::istreambuf_iterator<char>(stream), {}};
    EXPECT_EQ(std::string(file.bytes, file.bytes + file.size), expected) << file.path;
    EXPECT_GT(file.size, 0U) << file.path;
  }
}

TEST(KernelFiles, AFolderReplacesSingleFiles) {
  const std::filesystem::path folder =
      std::filesystem::path(testing::TempDir()) / fmt::format("clattn_kernels_{}", getpid());
  std::filesystem::create_directories(folder / "tile");
  std::ofstream(folder / "tile/selftest.cl") << "replaced\n";
  const ReadKernelFile read = kernel_file_reader(folder.string());
  EXPECT_EQ(read("tile/selftest.cl"), "replaced\n");
  EXPECT_EQ(read("shared/work_item.h"), kernel_file_reader({})("shared/work_item.h"));
  EXPECT_TRUE(read("shared/work_item.h").has_value());
  EXPECT_FALSE(read("../" + folder.filename().string() + "/tile/selftest.cl").has_value());
  std::filesystem::remove_all(folder);
  try {
    kernel_file_reader(folder.string());
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_EQ(error.what(), "CLATTN_KERNEL_DIR: '" + folder.string() + "' is no folder");
  }
}

}  // namespace
}  // namespace clattn::detail
