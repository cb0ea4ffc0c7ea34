#include <gtest/gtest.h>

#include <clattn/error.hpp>
#include <cstdlib>
#include <map>

#include "base/environment.hpp"

namespace clattn::detail {
namespace {

Environment parse(const std::map<std::string, std::string>& variables) {
  return parse_environment([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

std::size_t secure_reads = 0;

// F11: glibc's secure_getenv knows no variable where the process has more rights than its caller.
TEST(Environment, F11_IsReadAsAProcessWithMoreRightsMayReadIt) {
  static_cast<void>(environment());
  EXPECT_GT(secure_reads, 0U);
}

TEST(Environment, UnsetIsEmpty) {
  const Environment result = parse({});
  EXPECT_EQ(result.device, "");
  EXPECT_EQ(result.backend, "");
  EXPECT_EQ(result.kv_cache_layout, "");
  EXPECT_EQ(result.kernel_dir, "");
  EXPECT_EQ(result.cache_dir, "");
  EXPECT_EQ(result.capture_dir, "");
  EXPECT_FALSE(result.debug);
  EXPECT_TRUE(result.cache_enabled);
  EXPECT_EQ(result.tuning_file, "");
  EXPECT_TRUE(result.tuning_enabled);
  EXPECT_TRUE(result.plugins.empty());
  EXPECT_EQ(result.q_scale_constant, 200.0F);  // A2.1
  EXPECT_EQ(result.k_scale_constant, 200.0F);
  EXPECT_EQ(result.v_scale_constant, 100.0F);
}

TEST(Environment, NumbersArePositive) {
  for (const char* text : {"0", "-1", "ten", "1x", "inf", "nan"}) {
    try {
      parse({{"CLATTN_V_SCALE_CONSTANT", text}});
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()), "CLATTN_V_SCALE_CONSTANT is '" + std::string(text) +
                                               "', legal: a finite number > 0");
    }
  }
}

TEST(Environment, SwitchesKnowTheirWordsAndRefuseOthers) {
  for (const char* text : {"0", "off", "false", "no"}) {
    EXPECT_FALSE(parse({{"CLATTN_CACHE", text}}).cache_enabled) << text;
    EXPECT_FALSE(parse({{"CLATTN_TUNING", text}}).tuning_enabled) << text;
    EXPECT_FALSE(parse({{"CLATTN_DEBUG", text}}).debug) << text;
  }
  for (const char* text : {"", "1", "on", "true", "yes"}) {
    EXPECT_TRUE(parse({{"CLATTN_CACHE", text}}).cache_enabled) << text;
  }
  try {
    parse({{"CLATTN_TUNING", "never"}});
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()),
              "CLATTN_TUNING is 'never', legal: 0, off, false, no, 1, on, true, yes");
  }
}

TEST(Environment, EveryVariableHasItsField) {
  const Environment result = parse({{"CLATTN_DEVICE", "gpu"},
                                    {"CLATTN_BACKEND", "XFORMERS"},
                                    {"CLATTN_KV_CACHE_LAYOUT", "HND"},
                                    {"CLATTN_KERNEL_DIR", "/k"},
                                    {"CLATTN_CACHE_DIR", "/c"},
                                    {"CLATTN_CAPTURE_DIR", "/calls"},
                                    {"CLATTN_AMX", "off"},
                                    {"CLATTN_CACHE", "0"},
                                    {"CLATTN_TUNING_FILE", "/t.txt"},
                                    {"CLATTN_LOG", "debug"},
                                    {"CLATTN_DEBUG", "1"},
                                    {"CLATTN_TUNING", "off"},
                                    {"CLATTN_PLUGINS", ":/a.so::b.so:"},
                                    {"CLATTN_Q_SCALE_CONSTANT", "2.5"},
                                    {"CLATTN_K_SCALE_CONSTANT", "50"},
                                    {"CLATTN_V_SCALE_CONSTANT", "1e2"}});
  EXPECT_TRUE(result.debug);
  EXPECT_FALSE(result.amx_enabled);
  EXPECT_EQ(result.plugins, (std::vector<std::string>{"/a.so", "b.so"}));
  EXPECT_EQ(result.q_scale_constant, 2.5F);
  EXPECT_EQ(result.k_scale_constant, 50.0F);
  EXPECT_EQ(result.v_scale_constant, 100.0F);
  EXPECT_EQ(result.device, "gpu");
  EXPECT_EQ(result.backend, "XFORMERS");
  EXPECT_EQ(result.kv_cache_layout, "HND");
  EXPECT_EQ(result.kernel_dir, "/k");
  EXPECT_EQ(result.cache_dir, "/c");
  EXPECT_EQ(result.capture_dir, "/calls");
  EXPECT_FALSE(result.cache_enabled);
  EXPECT_EQ(result.tuning_file, "/t.txt");
  EXPECT_EQ(result.log_level, clattn::LogLevel::kDebug);
  EXPECT_FALSE(result.tuning_enabled);
}

TEST(Environment, TuningFileLadder) {
  const auto path = [](const std::map<std::string, std::string>& variables) {
    return parse(variables).tuning_file;
  };
  EXPECT_EQ(path({{"CLATTN_TUNING_FILE", "own"}, {"XDG_CONFIG_HOME", "/x"}, {"HOME", "/h"}}),
            "own");
  EXPECT_EQ(path({{"XDG_CONFIG_HOME", "/x"}, {"HOME", "/h"}}), "/x/clattn/tuning.txt");
  EXPECT_EQ(path({{"XDG_CONFIG_HOME", "rel"}, {"HOME", "/h"}}), "/h/.config/clattn/tuning.txt");
}

TEST(Environment, CacheFolderLadder) {
  EXPECT_EQ(
      parse({{"CLATTN_CACHE_DIR", "own"}, {"XDG_CACHE_HOME", "/x"}, {"HOME", "/h"}}).cache_dir,
      "own");
  EXPECT_EQ(parse({{"XDG_CACHE_HOME", "/x"}, {"HOME", "/h"}}).cache_dir, "/x/clattn");
  EXPECT_EQ(parse({{"XDG_CACHE_HOME", "relative"}, {"HOME", "/h"}}).cache_dir, "/h/.cache/clattn");
  EXPECT_EQ(parse({{"HOME", "/h"}}).cache_dir, "/h/.cache/clattn");
}

TEST(Environment, CacheSwitch) {
  EXPECT_FALSE(parse({{"CLATTN_CACHE", "off"}}).cache_enabled);
  EXPECT_TRUE(parse({{"CLATTN_CACHE", "1"}}).cache_enabled);
  EXPECT_TRUE(parse({{"CLATTN_CACHE", ""}}).cache_enabled);
}

}  // namespace
}  // namespace clattn::detail

// Stands before glibc's.
extern "C" char* secure_getenv(const char* name) noexcept {
  ++clattn::detail::secure_reads;
  return std::getenv(name);
}
