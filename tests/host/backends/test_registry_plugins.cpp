#include <gtest/gtest.h>

#include <clattn/clattn.hpp>
#include <clattn/plugin.hpp>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "support/counting_new.hpp"
#include "support/error_text.hpp"
#include "support/plugin.hpp"
#include "support/registry_test.hpp"

/// Plugins in the registry: what the loader takes, what it refuses, how long it keeps one.
namespace {

using clattn::AttentionConfig;
using clattn::DType;
using clattn::ErrorCode;
using test::error_text;
using test::is_loaded;
using test::Names;
using test::names;
using test::plugin_path;

using RegistryPlugins = test::RegistryTest;

// F9: dlopen() would map what the file no longer has, and touching that ends the process.
TEST_F(RegistryPlugins, F9_APluginThatIsCutOffIsRefused) {
  const std::string cut = testing::TempDir() + "clattn_cut_plugin.so";
  const auto whole = std::filesystem::file_size(plugin_path("none"));
  for (const std::uintmax_t size :
       {whole / 2, whole / 4, std::uintmax_t{64}, std::uintmax_t{10}, std::uintmax_t{0}}) {
    std::filesystem::copy_file(plugin_path("none"), cut,
                               std::filesystem::copy_options::overwrite_existing);
    std::filesystem::resize_file(cut, size);
    EXPECT_EQ(error_text([&] { clattn::load_backend_plugin(cut); }, ErrorCode::kIo)
                  .find("plugin '" + cut + "' cannot be opened: "),
              0U)
        << size;
  }
  std::filesystem::remove(cut);
}

TEST_F(RegistryPlugins, F9_NoFailedAllocationEndsTheProcess) {
  const std::string path = plugin_path("none");
  EXPECT_GT(test::fail_each_allocation([&] {
              const clattn::BackendPlugin plugin = clattn::load_backend_plugin(path);
              AttentionConfig config;
              config.head_size = 12;
              static_cast<void>(clattn::choose_attn_backend(config, nullptr));
            }),
            10U);
  EXPECT_EQ(names(), before_);
  EXPECT_FALSE(is_loaded(path));
}

TEST_F(RegistryPlugins, APluginIsListedChosenByNameAndUnloaded) {
  const std::string path = plugin_path("none");
  EXPECT_FALSE(is_loaded(path));
  {
    clattn::BackendPlugin plugin = clattn::load_backend_plugin(path);
    EXPECT_EQ(names(), (Names{"FLASHINFER", "XFORMERS", "CLATTN_MLA", "REFERENCE"}));
    EXPECT_EQ(plugin.backend()->library(), path);
    AttentionConfig config;
    config.num_heads = config.num_kv_heads = 2;
    config.head_size = 128;
    EXPECT_EQ(error_text([&] { clattn::get_attn_backend(config, nullptr, "REFERENCE"); },
                         ErrorCode::kUnsupported),
              "Selected backend REFERENCE is not valid for this configuration. Reason: dtypes "
              "other than f32 not supported; head_size 128 not supported: 1 to 64 are");
    config.dtype = DType::kF32;
    config.head_size = 4;
    EXPECT_EQ(clattn::get_attn_backend(config, nullptr)->name(), "REFERENCE");
    EXPECT_EQ(plugin.backend()->why_not(&AttentionConfig::sinks, {0.0F}),
              (Names{"sinks not supported"}));
    EXPECT_EQ(plugin.backend()->get_supported_head_sizes().size(), 64U);
    EXPECT_EQ(
        plugin.backend()->why_not(&AttentionConfig::attn_type, clattn::AttentionType::kEncoder),
        (Names{"attn_type encoder not supported by plugins"}));

    // A second one would have the same name.
    EXPECT_EQ(error_text([&] { clattn::load_backend_plugin(path); }),
              "plugin '" + path +
                  "': register_backend: a backend named 'REFERENCE' is registered already");
    const auto user = plugin.backend();
    plugin.reset();
    EXPECT_EQ(names(), before_);
    EXPECT_TRUE(is_loaded(path));  // the user
    EXPECT_EQ(user->get_kv_cache_shape(3, 4, 2, 8)[0], 3);
  }
  EXPECT_FALSE(is_loaded(path));
}

TEST_F(RegistryPlugins, PluginsThatDoNotFitAreRefusedWithAReason) {
  struct Row {
    const char* defect;
    ErrorCode code;
    const char* reason;
  };
  constexpr Row kRows[] = {
      {"nowhere", ErrorCode::kIo, "' cannot be opened: "},
      {"no_entry", ErrorCode::kUnsupported, "' has no entry point clattn_backend_plugin_v3"},
      {"abi_version", ErrorCode::kUnsupported, "' speaks ABI version 1, legal: 3"},
      {"struct_size", ErrorCode::kUnsupported, "': its ClattnBackendPlugin has "},
      {"newer_config", ErrorCode::kUnsupported, "': config_size is "},
      {"missing_function", ErrorCode::kUnsupported, "' lacks forward"},
      {"refuses", ErrorCode::kUnsupported, "' refuses to load (7): not on this host"},
      {"taken_name", ErrorCode::kInvalidArgument,
       "': register_backend: a backend named 'XFORMERS' is registered already"},
  };
  for (const Row& row : kRows) {
    const std::string path = plugin_path(row.defect);
    const std::string text = error_text([&] { clattn::load_backend_plugin(path); }, row.code);
    EXPECT_EQ(text.find("plugin '" + path + row.reason), 0U) << text;
    EXPECT_FALSE(is_loaded(path)) << row.defect;
  }
}

/// Lists the backends in a process of its own, whose environment names these plugins: prints their
/// names or the error.
[[noreturn]] void list_with_plugins(const std::string& paths) {
  setenv("CLATTN_PLUGINS", paths.c_str(), 1);
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      for (const std::string& name : names()) std::fprintf(stderr, "%s;", name.c_str());
    } catch (const clattn::Error& error) {
      std::fprintf(stderr, "%s;", error.what());
    }
  }
  std::exit(0);
}

TEST(PluginsOfTheEnvironment, AreLoadedAtFirstUseOrRefusedEachTime) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a fresh process
  EXPECT_EXIT(list_with_plugins(plugin_path("none")), testing::ExitedWithCode(0),
              "^FLASHINFER;XFORMERS;CLATTN_MLA;REFERENCE;FLASHINFER;XFORMERS;"
              "CLATTN_MLA;REFERENCE;$");
  const std::string refused =
      "CLATTN_PLUGINS: plugin '[^']*no_entry.so' has no entry point "
      "clattn_backend_plugin_v3;";
  EXPECT_EXIT(list_with_plugins(plugin_path("none") + ":" + plugin_path("no_entry")),
              testing::ExitedWithCode(0), "^" + refused + refused + "$");
}

}  // namespace
