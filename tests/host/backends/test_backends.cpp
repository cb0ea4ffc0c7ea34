#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <clattn/attn_utils.hpp>
#include <clattn/clattn.hpp>
#include <clattn/device.hpp>
#include <clattn/registry.hpp>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "support/error_text.hpp"

namespace {

using clattn::AttentionConfig;
using clattn::KVCacheLayout;
using Shape = std::array<std::int64_t, 5>;
using Order = std::array<std::int32_t, 5>;

AttentionConfig llama() {
  AttentionConfig config;
  config.num_heads = 32;
  config.num_kv_heads = 8;
  config.head_size = 128;
  return config;
}

const clattn::AttentionBackend& backend(std::string_view name) {
  for (const auto& entry : clattn::list_attn_backends()) {
    if (entry->name() == name) return *entry;
  }
  throw std::runtime_error("no such backend");
}

TEST(Backends, AreListedInPriorityOrder) {
  std::vector<std::string_view> names;
  for (const auto& entry : clattn::list_attn_backends()) names.push_back(entry->name());
  EXPECT_EQ(names, (std::vector<std::string_view>{"FLASHINFER", "XFORMERS", "CLATTN_MLA"}));
}

TEST(Backends, A1_10_GraphSupport) {
  using clattn::AttentionCGSupport;
  AttentionConfig config = llama();
  for (const char* name : {"FLASHINFER", "XFORMERS", "CLATTN_MLA"}) {
    const clattn::AttentionBackend& tested = backend(name);
    EXPECT_EQ(tested.graph_support(), AttentionCGSupport::kAlways) << name;
    EXPECT_TRUE(tested.supports_device_cpu_query_lens_mismatch()) << name;
    EXPECT_EQ(tested.get_varlen_cudagraph_max_query_len(config, 5), 5) << name;
    config.attn_type = clattn::AttentionType::kDecoder;
    EXPECT_EQ(tested.get_cudagraph_support(config), AttentionCGSupport::kAlways) << name;
    config.attn_type = clattn::AttentionType::kEncoderDecoder;
    EXPECT_EQ(tested.get_cudagraph_support(config), AttentionCGSupport::kUniformBatch) << name;
  }
  config.attn_type = clattn::AttentionType::kDecoder;
  config.is_attention_free = true;
  EXPECT_EQ(clattn::get_attn_backend(config, nullptr)->graph_support(), AttentionCGSupport::kNever);
  EXPECT_EQ(
      clattn::get_attn_backend(config, nullptr)->get_varlen_cudagraph_max_query_len(config, 5),
      std::nullopt);
}

TEST(Backends, A1_10_LeastGraphSupportOfGroups) {
  using clattn::AttentionCGSupport;
  std::vector<clattn::AttentionGroup> groups(3);  // the first: states, which have no backend
  EXPECT_EQ(clattn::get_attn_cg_support(groups).min_cg_support, AttentionCGSupport::kAlways);
  groups[1].backend = clattn::list_attn_backends()[0];
  groups[2].backend = clattn::list_attn_backends()[1];
  EXPECT_EQ(clattn::get_attn_cg_support(groups).min_cg_attn_backend, "FLASHINFER");
  groups[2].config.attn_type = clattn::AttentionType::kEncoderDecoder;
  const clattn::AttentionCGSupportInfo least = clattn::get_attn_cg_support(groups);
  EXPECT_EQ(least.min_cg_support, AttentionCGSupport::kUniformBatch);
  EXPECT_EQ(least.min_cg_attn_backend, "XFORMERS");
}

TEST(Backends, CacheShapesAndStrideOrders) {
  const auto& flashinfer = backend("FLASHINFER");
  EXPECT_EQ(flashinfer.get_kv_cache_shape(10, 16, 8, 128), (Shape{10, 2, 16, 8, 128}));
  EXPECT_EQ(flashinfer.get_kv_cache_stride_order(KVCacheLayout::kNHD), (Order{0, 1, 2, 3, 4}));
  EXPECT_EQ(flashinfer.get_kv_cache_stride_order(KVCacheLayout::kHND), (Order{0, 1, 3, 2, 4}));
  const auto& xformers = backend("XFORMERS");
  EXPECT_EQ(xformers.get_kv_cache_shape(10, 16, 8, 128), (Shape{2, 10, 16, 8, 128}));
  EXPECT_EQ(xformers.get_kv_cache_stride_order(KVCacheLayout::kNHD), (Order{0, 1, 2, 3, 4}));
  // A7: one row a token, whatever the layout.
  const auto& mla = backend("CLATTN_MLA");
  EXPECT_EQ(mla.get_kv_cache_shape(10, 64, 1, 576), (Shape{1, 10, 64, 1, 576}));
  EXPECT_EQ(mla.get_kv_cache_stride_order(KVCacheLayout::kHND), (Order{0, 1, 2, 3, 4}));
  EXPECT_EQ(mla.get_required_kv_cache_layout(), std::nullopt);
  try {
    (void)mla.get_kv_cache_shape(10, 64, 2, 576);
    FAIL();
  } catch (const clattn::Error& error) {
    EXPECT_STREQ(error.what(), "num_kv_heads is 2, legal: 1 (MLA)");
  }
}

TEST(Backends, SayWhichLayoutsTheyHave) {
  using Reasons = std::vector<std::string>;
  const auto& dense = backend("XFORMERS");
  const std::string reason = "layout HND not supported by XFORMERS: NHD is";
  for (const char* name : {"FLASHINFER", "CLATTN_MLA"}) {
    EXPECT_EQ(backend(name).validate_layout(KVCacheLayout::kHND), Reasons{}) << name;
  }
  EXPECT_EQ(dense.validate_layout(KVCacheLayout::kNHD), Reasons{});
  EXPECT_EQ(dense.validate_layout(KVCacheLayout::kHND), Reasons{reason});
  EXPECT_EQ(test::error_text([&] { (void)dense.get_kv_cache_stride_order(KVCacheLayout::kHND); },
                             clattn::ErrorCode::kUnsupported),
            reason);
}

TEST(Backends, XFormersKeepsItsErrors) {
  const auto& xformers = backend("XFORMERS");
  try {
    (void)xformers.get_kv_cache_shape(10, 24, 8, 128);
    FAIL();
  } catch (const clattn::Error& error) {
    EXPECT_STREQ(error.what(), "Block size must be a multiple of 16.");
  }
  try {
    (void)xformers.get_kv_cache_stride_order(KVCacheLayout::kHND);
    FAIL();
  } catch (const clattn::Error& error) {
    EXPECT_EQ(error.code(), clattn::ErrorCode::kUnsupported);
  }
}

TEST(Selector, TakesTheFirstThatFitsAndSaysWhyOthersDoNot) {
  AttentionConfig config = llama();
  EXPECT_EQ(clattn::get_attn_backend(config, nullptr)->name(), "FLASHINFER");
  config.dtype = clattn::DType::kF32;
  config.head_size = 24;
  config.block_size = 5;
  const clattn::BackendChoice choice = clattn::choose_attn_backend(config, nullptr);
  ASSERT_NE(choice.backend, nullptr);
  EXPECT_EQ(choice.backend->name(), "FLASHINFER");
  ASSERT_EQ(choice.rejected.size(), 2U);
  EXPECT_EQ(choice.rejected[0].name, "XFORMERS");
  EXPECT_EQ(choice.rejected[0].reasons,
            (std::vector<std::string>{
                "dtype f32 not supported: f16 and bf16 are",
                "Head size 24 is not supported by XFormersAttention. Supported head sizes are: "
                "[32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 144, 152, 160, 168, "
                "176, 184, 192, 200, 208, 216, 224, 232, 240, 248, 256]. Set "
                "CLATTN_BACKEND=FLASHINFER to use a backend which supports 8 … 512 in steps of 8.",
                "Block size must be a multiple of 16."}));
}

TEST(Selector, ValuesMayHaveFewerElementsThanKeys) {
  AttentionConfig config = llama();
  config.head_size = 192;
  config.head_size_v = 128;
  const auto reasons = [&] {
    return backend("FLASHINFER").validate_configuration(config, nullptr);
  };
  using Reasons = std::vector<std::string>;
  EXPECT_EQ(reasons(), Reasons{});
  config.attn_type = clattn::AttentionType::kEncoderOnly;
  EXPECT_EQ(reasons(), Reasons{});
  EXPECT_EQ(config.output_head_size(), 128);
  for (const std::int32_t size : {200, 12}) {
    config.head_size_v = size;
    EXPECT_EQ(reasons(), Reasons{fmt::format("head_size_v {} not supported: 8 … 192 (head_size) in "
                                             "steps of 8 are, or 0",
                                             size)});
  }
  config.head_size_v = -8;
  EXPECT_EQ(reasons(), Reasons{"head_size_v is -8, supported: 0 … 65536 (0 = head_size)"});
  config.head_size_v = 192;  // as if it were not given
  config.attn_type = clattn::AttentionType::kDecoder;
  EXPECT_EQ(reasons(), Reasons{});
  config.head_size_v = 128;
  config.use_mla = true;
  config.num_kv_heads = 1;
  config.head_size = 512 + 64;
  EXPECT_EQ(backend("CLATTN_MLA").validate_configuration(config, nullptr),
            Reasons{"MLA is not supported for head_size_v"});
}

// F5: one range a backend, and no advice that does not help.
TEST(Selector, F5_HeadSizesAreRefusedOnceABackend) {
  for (const std::int32_t head_size : {30, 520}) {
    AttentionConfig config = llama();
    config.head_size = head_size;
    const clattn::BackendChoice choice = clattn::choose_attn_backend(config, nullptr);
    EXPECT_EQ(choice.backend, nullptr);
    ASSERT_EQ(choice.rejected.size(), 3U);
    EXPECT_EQ(choice.rejected[0].reasons,
              std::vector{
                  fmt::format("head_size {} not supported: 8 … 512 in steps of 8 are", head_size)});
    ASSERT_EQ(choice.rejected[1].reasons.size(), 1U);
    const std::string& xformers = choice.rejected[1].reasons[0];
    EXPECT_TRUE(xformers.ends_with("248, 256].")) << xformers;
  }
}

TEST(Selector, AForcedBackendFitsOrIsRefusedWithReasons) {
  AttentionConfig config = llama();
  EXPECT_EQ(clattn::get_attn_backend(config, nullptr, "XFORMERS")->name(), "XFORMERS");
  config.block_size = 5;
  try {
    (void)clattn::get_attn_backend(config, nullptr, "XFORMERS");
    FAIL();
  } catch (const clattn::Error& error) {
    EXPECT_EQ(error.code(), clattn::ErrorCode::kUnsupported);
    EXPECT_STREQ(
        error.what(),
        "Selected backend XFORMERS is not valid for this configuration. Reason: Block size "
        "must be a multiple of 16.");
  }
}

// M1: vLLM's names for the built-in backends choose them.
TEST(Selector, M1_VllmsNamesOfTheBuiltInBackends) {
  const std::pair<std::string_view, std::string_view> rows[] = {
      {"FLASHINFER_VLLM_V1", "FLASHINFER"},
      {"vllm.attention.backends.flashinfer.FlashInferBackend", "FLASHINFER"},
      {"vllm.v1.attention.backends.flashinfer.FlashInferBackend", "FLASHINFER"},
      {"XFORMERS_VLLM_V1", "XFORMERS"},
      {"vllm.v1.attention.backends.xformers.XFormersAttentionBackend", "XFORMERS"}};
  for (const auto& [name, ours] : rows) {
    EXPECT_EQ(clattn::get_attn_backend(llama(), nullptr, name)->name(), ours) << name;
    EXPECT_EQ(clattn::find_attn_backend(name)->name(), ours) << name;
  }
}

// M12: of other libraries' backends vLLM's names are refused with the name to use.
TEST(Selector, M12_NamesOfOtherLibrariesSayWhatToUse) {
  for (const std::string name : {"FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "CPU_ATTN",
                                 "TREE_ATTN", "TORCH_SDPA", "FLASH_ATTN_VLLM_V1", "ROCM_ATTN"}) {
    EXPECT_EQ(test::error_text([&] { (void)clattn::get_attn_backend(llama(), nullptr, name); },
                               clattn::ErrorCode::kInvalidArgument),
              "Invalid attention backend: '" + name +
                  "'. Valid backends are: auto, FLASHINFER, XFORMERS, CLATTN_MLA; FLASHINFER "
                  "computes what " +
                  name + " does");
  }
  EXPECT_EQ(clattn::find_attn_backend("auto"), nullptr);  // as those texts say
  for (const std::string name : {"FLASHMLA", "TRITON_MLA", "CUTLASS_MLA", "CPU_MLA"}) {
    EXPECT_NE(test::error_text([&] { (void)clattn::find_attn_backend(name); },
                               clattn::ErrorCode::kInvalidArgument)
                  .find("; CLATTN_MLA computes what " + name + " does"),
              std::string::npos)
        << name;
  }
}

/// Chooses in a process of its own, whose environment names this backend: prints what happened
/// without a name, with one and with "auto".
[[noreturn]] void choose_with_environment(const char* backend_name, std::int32_t block_size) {
  setenv("CLATTN_BACKEND", backend_name, 1);
  AttentionConfig config = llama();
  config.block_size = block_size;
  for (const char* name : {"", "FLASHINFER", "auto"}) {
    try {
      const auto& chosen = *clattn::get_attn_backend(config, nullptr, name);
      std::fprintf(stderr, "%s;", std::string(chosen.name()).c_str());
    } catch (const clattn::Error& error) {
      std::fprintf(stderr, "%s;", error.what());
    }
  }
  std::exit(0);
}

// A8: the argument before the environment before the order.
TEST(Selector, A8_TheEnvironmentForcesABackendUnlessOneIsNamed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a fresh process
  const testing::ExitedWithCode fine(0);
  EXPECT_EXIT(choose_with_environment("XFORMERS", 16), fine, "^XFORMERS;FLASHINFER;FLASHINFER;$");
  EXPECT_EXIT(choose_with_environment("auto", 16), fine, "^FLASHINFER;FLASHINFER;FLASHINFER;$");
  EXPECT_EXIT(choose_with_environment("XFORMERS", 5), fine,
              "^Selected backend XFORMERS is not valid for this configuration. Reason: Block size "
              "must be a multiple of 16.;FLASHINFER;FLASHINFER;$");
  EXPECT_EXIT(choose_with_environment("XFORMERS_VLLM_V1", 16), fine,
              "^XFORMERS;FLASHINFER;FLASHINFER;$");
  EXPECT_EXIT(choose_with_environment("FLASH", 16), fine,
              "^Invalid attention backend: 'FLASH'. Valid backends are: auto, FLASHINFER, "
              "XFORMERS, CLATTN_MLA;FLASHINFER;FLASHINFER;$");
}

// A8: the same rules for latent attention.
TEST(Selector, ForcedBackendsAndLatentAttention) {
  AttentionConfig config;
  config.num_heads = 128;
  config.num_kv_heads = 1;
  config.head_size = 512 + 64;
  config.block_size = 64;
  config.use_mla = true;
  EXPECT_EQ(clattn::get_attn_backend(config, nullptr)->name(), "CLATTN_MLA");
  EXPECT_EQ(clattn::get_attn_backend(config, nullptr, "CLATTN_MLA")->name(), "CLATTN_MLA");
  const auto refusal = [&](std::string_view name) -> std::string {
    try {
      (void)clattn::get_attn_backend(config, nullptr, name);
    } catch (const clattn::Error& error) {
      EXPECT_EQ(error.code(), clattn::ErrorCode::kUnsupported);
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(refusal("FLASHINFER"),
            "Selected backend FLASHINFER is not valid for this configuration. Reason: head_size "
            "576 not supported: 8 … 512 in steps of 8 are; MLA not supported");
  config.use_mla = false;
  config.head_size = 128;
  EXPECT_EQ(clattn::get_attn_backend(config, nullptr)->name(), "FLASHINFER");
  EXPECT_EQ(refusal("CLATTN_MLA"),
            "Selected backend CLATTN_MLA is not valid for this configuration. Reason: non-MLA not "
            "supported");
}

TEST(Selector, UnknownNamesAndImpossibleShapesAreClear) {
  try {
    (void)clattn::get_attn_backend(llama(), nullptr, "FLASH");
    FAIL();
  } catch (const clattn::Error& error) {
    EXPECT_EQ(error.code(), clattn::ErrorCode::kInvalidArgument);
    EXPECT_STREQ(
        error.what(),
        "Invalid attention backend: 'FLASH'. Valid backends are: auto, FLASHINFER, XFORMERS, "
        "CLATTN_MLA");
  }
  for (const std::string name : {"DUAL_CHUNK_FLASH_ATTN", "TURBOQUANT"}) {
    EXPECT_EQ(test::error_text([&] { (void)clattn::find_attn_backend(name); },
                               clattn::ErrorCode::kInvalidArgument)
                  .find("Invalid attention backend: '" + name + "'. Valid backends are: "),
              0U);
  }
  AttentionConfig config = llama();
  config.num_kv_heads = 5;
  config.head_size = 12;
  config.sinks = {0.5F};
  const clattn::DeviceCapabilities* const nobody = nullptr;
  clattn::DeviceCapabilities device;
  device.name = "Some GPU";
  for (const auto* where : {static_cast<const clattn::DeviceCapabilities*>(&device), nobody}) {
    const std::string wanted =
        std::string("No valid attention backend found for ") +
        (where != nullptr ? "Some GPU" : "any device") +
        " with AttentionConfig(num_heads=32, num_kv_heads=5, head_size=12, block_size=16, "
        "dtype=f16, kv_cache_dtype=auto, sinks=[1]). Reasons: FLASHINFER: ";
    try {
      (void)clattn::get_attn_backend(config, where);
      FAIL();
    } catch (const clattn::Error& error) {
      EXPECT_EQ(std::string(error.what()).find(wanted), 0U) << error.what();
    }
  }
  try {
    (void)clattn::get_attn_backend(config, nullptr);
    FAIL();
  } catch (const clattn::Error& error) {
    EXPECT_EQ(error.code(), clattn::ErrorCode::kUnsupported);
    const std::string text = error.what();
    EXPECT_NE(text.find("num_heads (32) is not divisible by num_kv_heads (5)"), std::string::npos);
    EXPECT_NE(text.find("head_size 12 not supported: 8 … 512 in steps of 8 are"),
              std::string::npos);
  }
}

TEST(Selector, Q2_TheNearestBackendsReasonsComeFirst) {
  const auto reasons = [](const AttentionConfig& config) {
    const std::string text = test::error_text(
        [&] { (void)clattn::get_attn_backend(config, nullptr); }, clattn::ErrorCode::kUnsupported);
    return text.substr(text.find("Reasons: "));
  };
  AttentionConfig config = llama();
  config.head_size = 12;
  EXPECT_EQ(reasons(config).find("Reasons: FLASHINFER: head_size 12 not supported: 8 … 512 in "
                                 "steps of 8 are | other backends: XFORMERS: Head size 12"),
            0U)
      << reasons(config);
  EXPECT_TRUE(reasons(config).ends_with(" | CLATTN_MLA: non-MLA not supported")) << reasons(config);
  config = llama();
  config.use_mla = true;
  config.num_kv_heads = 2;
  EXPECT_EQ(reasons(config).find("Reasons: CLATTN_MLA: num_kv_heads is 2, supported: 1"), 0U)
      << reasons(config);
}

TEST(Backends, Q2_XFormersDoesNotOfferTheTypeThatItRefuses) {
  AttentionConfig config = llama();
  config.dtype = clattn::DType::kF32;
  config.kv_cache_dtype = clattn::DType::kF16;
  EXPECT_EQ(backend("XFORMERS").validate_configuration(config, nullptr),
            std::vector<std::string>{"dtype f32 not supported: f16 and bf16 are"});
}

}  // namespace
