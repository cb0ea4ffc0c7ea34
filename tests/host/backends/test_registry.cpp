#include <gtest/gtest.h>

#include <clattn/clattn.hpp>
#include <clattn/mla.hpp>
#include <clattn/plugin.hpp>
#include <clattn/registry.hpp>
#include <string>
#include <thread>
#include <vector>

#include "support/error_text.hpp"
#include "support/fake_backend.hpp"
#include "support/plugin.hpp"
#include "support/registry_test.hpp"

namespace {

using clattn::AttentionConfig;
using clattn::DType;
using clattn::ErrorCode;
using test::error_text;
using test::FakeBackend;
using test::Names;
using test::names;
using test::plugin_path;

using Registry = test::RegistryTest;

// B3.1: registration at run time, priority order, explicit override.
TEST_F(Registry, PositionIsPriority) {
  clattn::register_backend(std::make_shared<FakeBackend>("LAST"));
  clattn::register_backend(std::make_shared<FakeBackend>("FIRST"), 0);
  clattn::register_backend(std::make_shared<FakeBackend>("SECOND"), 1);
  EXPECT_EQ(names(), (Names{"FIRST", "SECOND", "FLASHINFER", "XFORMERS", "CLATTN_MLA", "LAST"}));
  AttentionConfig config;
  config.num_heads = config.num_kv_heads = 1;
  config.head_size = 64;
  EXPECT_EQ(clattn::get_attn_backend(config, nullptr)->name(), "FIRST");
  EXPECT_EQ(clattn::get_attn_backend(config, nullptr, "LAST")->name(), "LAST");
  config.head_size = 128;
  EXPECT_EQ(clattn::get_attn_backend(config, nullptr)->name(), "FLASHINFER");
  EXPECT_EQ(clattn::choose_attn_backend(config, nullptr).rejected.at(0).reasons,
            (Names{"only heads of 64"}));
  for (const char* name : {"FIRST", "SECOND", "LAST"}) clattn::unregister_backend(name);
}

TEST_F(Registry, NamesAreUniqueAndNotReserved) {
  const auto add = [](const char* name, std::size_t position) {
    return error_text(
        [&] { clattn::register_backend(std::make_shared<FakeBackend>(name), position); });
  };
  EXPECT_EQ(add("XFORMERS", 0),
            "register_backend: a backend named 'XFORMERS' is registered already");
  for (const char* name : {"", "auto", "NO_ATTENTION"}) {
    EXPECT_NE(add(name, 0).find("is reserved, legal: any but"), std::string::npos) << name;
  }
  EXPECT_EQ(add("FAR", 4), "register_backend: position is 4, legal: 0 … 3");
  EXPECT_EQ(error_text([] { clattn::register_backend(nullptr); }), "register_backend: null");
  EXPECT_EQ(error_text([] { clattn::unregister_backend("NOBODY"); }),
            "unregister_backend: no backend is named 'NOBODY'. Registered are: FLASHINFER, "
            "XFORMERS, CLATTN_MLA");
}

TEST_F(Registry, AnEntryLivesUntilItsLastUserIsGone) {
  auto made = std::make_shared<FakeBackend>("SHORT");
  const std::weak_ptr<FakeBackend> watch = made;
  clattn::register_backend(std::move(made));
  auto list = clattn::list_attn_backends();
  std::shared_ptr<const clattn::AttentionBackend> kept =
      clattn::get_attn_backend(64, DType::kF16, std::nullopt, 16);
  clattn::unregister_backend("SHORT");
  EXPECT_EQ(list[3]->name(), "SHORT");  // the snapshot does not change
  EXPECT_FALSE(watch.expired());
  list.clear();
  EXPECT_TRUE(watch.expired());
  EXPECT_EQ(kept->name(), "FLASHINFER");
}

TEST_F(Registry, BuiltInBackendsCanBeTakenOutAndPutBack) {
  const auto taken = clattn::unregister_backend("FLASHINFER");
  EXPECT_EQ(clattn::get_attn_backend(64, DType::kF16, std::nullopt, 16)->name(), "XFORMERS");
  clattn::register_backend(taken, 0);
  EXPECT_EQ(clattn::get_attn_backend(64, DType::kF16, std::nullopt, 16)->name(), "FLASHINFER");
}

// A2.9: memoised on all arguments; a change of the registry forgets.
TEST_F(Registry, TheSelectorAsksOnceForEqualArguments) {
  const auto fake = std::make_shared<FakeBackend>("COUNTING");
  clattn::register_backend(fake, 0);
  const auto choose = [](std::int32_t head_size, bool has_sink) {
    return clattn::get_attn_backend(head_size, DType::kF16, std::nullopt, 16, false, false,
                                    has_sink)
        ->name();
  };
  EXPECT_EQ(choose(64, false), "COUNTING");
  const int asked = fake->asked;
  EXPECT_EQ(choose(64, false), "COUNTING");
  EXPECT_EQ(fake->asked, asked);
  EXPECT_EQ(choose(128, false), "FLASHINFER");
  EXPECT_EQ(choose(64, true), "COUNTING");
  EXPECT_GT(fake->asked, asked + 1);
  clattn::unregister_backend("COUNTING");
  EXPECT_EQ(choose(64, false), "FLASHINFER");
}

TEST_F(Registry, ThreadsRegisterListAndChooseAtOnce) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([i] {
      const std::string name = "THREAD" + std::to_string(i);
      for (int round = 0; round < 50; ++round) {
        clattn::register_backend(std::make_shared<FakeBackend>(name));
        EXPECT_GE(clattn::list_attn_backends().size(), 4U);
        EXPECT_EQ(clattn::get_attn_backend(128, DType::kF16, std::nullopt, 16)->name(),
                  "FLASHINFER");
        EXPECT_EQ(clattn::unregister_backend(name)->name(), name);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A8: attention-free models get a placeholder, whatever is forced.
TEST_F(Registry, AttentionFreeModelsGetAPlaceholderThatRefuses) {
  AttentionConfig config;
  config.is_attention_free = true;
  const auto& backend = *clattn::get_attn_backend(config, nullptr, "XFORMERS");
  EXPECT_EQ(backend.name(), "NO_ATTENTION");
  EXPECT_EQ(clattn::get_attn_backend(64, DType::kF16, std::nullopt, 16, true)->name(),
            "NO_ATTENTION");
  EXPECT_EQ(clattn::choose_attn_backend(config, nullptr).backend->name(), "NO_ATTENTION");
  EXPECT_EQ(error_text([&] { backend.make_impl(nullptr, config); }, ErrorCode::kUnsupported),
            "backend NO_ATTENTION: the model has no attention, so there is no AttentionImpl");
  EXPECT_NE(error_text([&] { backend.get_kv_cache_shape(1, 1, 1, 1); }, ErrorCode::kUnsupported)
                .find("no KV cache"),
            std::string::npos);
}

// A8: use_mla selects an MLA backend and nothing else does.
TEST_F(Registry, LatentAttentionIsForBackendsThatKnowIt) {
  const auto choose = [](bool use_mla, bool has_sink) {
    return clattn::get_attn_backend(576, DType::kF16, std::nullopt, 64, false, use_mla, has_sink)
        ->name();
  };
  EXPECT_EQ(choose(true, false), clattn::kMLABackendName);
  const std::string plain = error_text([&] { choose(false, false); }, ErrorCode::kUnsupported);
  EXPECT_NE(plain.find("CLATTN_MLA: non-MLA not supported"), std::string::npos) << plain;
  const std::string sink = error_text([&] { choose(true, true); }, ErrorCode::kUnsupported);
  EXPECT_NE(sink.find("FLASHINFER: head_size 576 not supported: 8 … 512 in steps of 8 are; MLA not "
                      "supported |"),
            std::string::npos)
      << sink;
  EXPECT_NE(sink.find("XFORMERS: "), std::string::npos) << sink;
  EXPECT_NE(sink.find("CLATTN_MLA: MLA is not supported for sinks"), std::string::npos) << sink;
}

/// Reasons against any configuration on a device without work-groups.
Names on_no_device(const clattn::AttentionBackend& backend) {
  const clattn::DeviceCapabilities none;
  return backend.validate_configuration(backend.common_configuration(), &none);
}

// A2.4: predicates give reasons.
TEST_F(Registry, PredicatesSayWhyNot) {
  const auto list = clattn::list_attn_backends();
  const auto& flashinfer = *list[0];
  const auto& xformers = *list[1];
  EXPECT_EQ(flashinfer.why_not(&AttentionConfig::head_size, 72), Names{});
  EXPECT_EQ(flashinfer.why_not(&AttentionConfig::head_size, 12),
            (Names{"head_size 12 not supported: 8 … 512 in steps of 8 are"}));
  EXPECT_EQ(xformers.why_not(&AttentionConfig::dtype, DType::kF32),
            (Names{"dtype f32 not supported: f16 and bf16 are"}));
  EXPECT_EQ(xformers.why_not(&AttentionConfig::block_size, 24),
            (Names{"Block size must be a multiple of 16."}));
  EXPECT_EQ(flashinfer.why_not(&AttentionConfig::block_size, 24), Names{});
  EXPECT_EQ(xformers.why_not(&AttentionConfig::kv_cache_dtype, DType::kF32),
            (Names{"kv_cache_dtype f32 not supported: auto, the dtype (f16), fp8 and int8 are"}));
  EXPECT_EQ(flashinfer.why_not(&AttentionConfig::kv_cache_dtype, DType::kF32), Names{});
  EXPECT_EQ(flashinfer.why_not(&AttentionConfig::use_mla, true), (Names{"MLA not supported"}));
  for (const auto& backend : list) {
    EXPECT_EQ(backend->why_not(&AttentionConfig::kv_cache_dtype, DType::kFp8E4M3), Names{});
    EXPECT_EQ(backend->library(), "");
    if (backend->is_mla()) continue;
    EXPECT_EQ(backend->why_not(&AttentionConfig::sinks, {0.0F}), Names{});
    EXPECT_EQ(backend->why_not(&AttentionConfig::alibi_slopes, {0.5F}), Names{});
    EXPECT_EQ(backend->why_not(&AttentionConfig::logits_soft_cap, 30), Names{});
    EXPECT_EQ(backend->why_not(&AttentionConfig::sliding_window, 128), Names{});
    EXPECT_EQ(backend->why_not(&AttentionConfig::window_left, 0), Names{});
    EXPECT_EQ(backend->why_not(&AttentionConfig::window_right, 127), Names{});
    for (const auto type :
         {clattn::AttentionType::kDecoder, clattn::AttentionType::kEncoder,
          clattn::AttentionType::kEncoderOnly, clattn::AttentionType::kEncoderDecoder}) {
      EXPECT_EQ(backend->why_not(&AttentionConfig::attn_type, type), Names{});
    }
    AttentionConfig fused{.num_heads = 4, .num_kv_heads = 2, .head_size = 64};
    fused.output_fp8 = true;
    EXPECT_EQ(backend->validate_configuration(fused, nullptr), Names{});
    const auto needs = [](const std::string& role, int work_items) {
      return "no " + role + " kernel of family auto runs on : needs " + std::to_string(work_items) +
             " work-items per group, the device allows 1";
    };
    EXPECT_EQ(on_no_device(*backend),
              (Names{needs("prefill", 256), needs("merge", 128), needs("cache", 128)}));
  }
  EXPECT_EQ(xformers.get_supported_head_sizes().front(), 32);
  EXPECT_EQ(xformers.get_supported_head_sizes().back(), 256);
  EXPECT_EQ(xformers.get_supported_head_sizes().size(), 29U);
  EXPECT_EQ(flashinfer.get_supported_head_sizes().size(), 64U);
  using Sizes = std::vector<clattn::SupportedBlockSize>;
  EXPECT_EQ(xformers.get_supported_kernel_block_sizes(), (Sizes{{16, true}}));
  EXPECT_EQ(flashinfer.get_supported_kernel_block_sizes(), (Sizes{{1, true}}));
  EXPECT_EQ(xformers.get_required_kv_cache_layout(), clattn::KVCacheLayout::kNHD);
  EXPECT_EQ(flashinfer.get_required_kv_cache_layout(), std::nullopt);
}

// A2.4: what the engine will do with the layer is asked for like the layer itself.
TEST_F(Registry, A2_4_NeedsOfTheEngineHaveReasons) {
  const std::string connector =
      "KV connector not supported: layers call no hooks; an engine may move blocks between steps "
      "(swap_blocks)";
  const std::string pcp =
      "prefill context parallelism not supported: no kernel shares a prompt with other devices";
  for (const auto& backend : clattn::list_attn_backends()) {
    EXPECT_EQ(backend->why_not(&AttentionConfig::use_non_causal, true), Names{});
    EXPECT_EQ(backend->why_not(&AttentionConfig::use_batch_invariant, true), Names{});
    EXPECT_EQ(backend->why_not(&AttentionConfig::use_per_head_quant_scales, true), Names{});
    EXPECT_EQ(backend->why_not(&AttentionConfig::use_spans, true), Names{});
    EXPECT_EQ(backend->why_not(&AttentionConfig::use_kv_connector, true), Names{connector});
    EXPECT_EQ(backend->why_not(&AttentionConfig::use_pcp, true), Names{pcp});
  }
  AttentionConfig config;
  config.num_heads = config.num_kv_heads = 1;
  config.head_size = 64;
  config.use_spans = config.use_pcp = true;
  EXPECT_EQ(clattn::choose_attn_backend(config, nullptr).rejected.at(0).reasons, (Names{pcp}));
  const clattn::BackendPlugin plugin = clattn::load_backend_plugin(plugin_path("none"));
  EXPECT_EQ(plugin.backend()->why_not(&AttentionConfig::use_non_causal, true), Names{});
  EXPECT_EQ(plugin.backend()->why_not(&AttentionConfig::use_batch_invariant, true),
            (Names{"use_batch_invariant not supported by plugins"}));
  EXPECT_EQ(plugin.backend()->why_not(&AttentionConfig::custom_mask, true),
            (Names{"custom_mask not supported by plugins"}));
  EXPECT_EQ(plugin.backend()->why_not(&AttentionConfig::use_trees, true), Names{});
}

TEST_F(Registry, WhatABatchSaysOfRequestsIsForLayersWithTheirOwnKeys) {
  const auto& backend = *clattn::list_attn_backends().at(0);
  AttentionConfig config = backend.common_configuration();
  config.span_rule = clattn::SpanRule::kClipLeft;
  EXPECT_EQ(backend.validate_configuration(config, nullptr),
            (Names{"span_rule is clip_left, supported without use_spans: whole"}));
  config.use_spans = config.use_directions = config.use_first_keys = true;
  EXPECT_EQ(backend.validate_configuration(config, nullptr), Names{});
  config.use_keep_keys = true;
  EXPECT_EQ(backend.validate_configuration(config, nullptr), Names{});
  config.attention_chunk_size = 8;
  EXPECT_EQ(backend.validate_configuration(config, nullptr), Names{});
  config.attention_chunk_size = 0;
  config.use_keep_keys = false;
  config.attn_type = clattn::AttentionType::kEncoderOnly;
  EXPECT_EQ(backend.validate_configuration(config, nullptr), Names{});
  config.attn_type = clattn::AttentionType::kEncoder;
  EXPECT_EQ(backend.validate_configuration(config, nullptr),
            (Names{"use_spans is true, supported with attn_type encoder: false",
                   "use_directions is true, supported with attn_type encoder: false",
                   "use_first_keys is true, supported with attn_type encoder: false"}));
}

// A5: the list and the words of validate_head_size.
TEST_F(Registry, A5_SupportedTypesAndHeadSizes) {
  const auto list = clattn::list_attn_backends();
  using DTypes = std::vector<DType>;
  EXPECT_EQ(list[0]->get_supported_dtypes(), (DTypes{DType::kF32, DType::kF16, DType::kBF16}));
  EXPECT_EQ(list[1]->get_supported_dtypes(), (DTypes{DType::kF16, DType::kBF16}));
  list[1]->validate_head_size(40);
  const std::string text =
      error_text([&] { list[1]->validate_head_size(24); }, ErrorCode::kUnsupported);
  EXPECT_EQ(text.find("Head size 24 is not supported by XFormersAttention. Supported head sizes "
                      "are: [32, 40, "),
            0U)
      << text;
  AttentionConfig config;
  EXPECT_EQ(config.num_queries_per_kv(), 0);
  config.num_heads = 32;
  config.num_kv_heads = 8;
  EXPECT_EQ(config.num_queries_per_kv(), 4);
}

TEST_F(Registry, AWindowIsSaidByItsSidesOrByTheShorthand) {
  const auto& backend = *clattn::list_attn_backends()[0];
  EXPECT_EQ(backend.why_not(&AttentionConfig::window_left, -2),
            (Names{"window_left is -2, supported: >= -1 (-1 = all)"}));
  EXPECT_EQ(backend.why_not(&AttentionConfig::window_right, -2),
            (Names{"window_right is -2, supported: >= -1 (-1 = all)"}));
  AttentionConfig config = backend.common_configuration();
  config.sliding_window = 8;
  config.window_left = 0;
  config.window_right = 7;
  EXPECT_EQ(backend.validate_configuration(config, nullptr),
            (Names{"window_left is 0, supported with a sliding_window, which says both sides: -1",
                   "window_right is 7, supported with a sliding_window, which says both sides: "
                   "-1"}));
}

// A2.4, A7: the MLA backend's predicates.
TEST_F(Registry, LatentAttentionSaysWhatItDoesNotCompute) {
  const auto& mla = *clattn::list_attn_backends()[2];
  EXPECT_TRUE(mla.is_mla());
  EXPECT_EQ(mla.why_not(&AttentionConfig::use_mla, true), Names{});
  EXPECT_EQ(mla.why_not(&AttentionConfig::sliding_window, 128),
            (Names{"MLA is not supported for sliding_window"}));
  EXPECT_EQ(mla.why_not(&AttentionConfig::window_left, 0),
            (Names{"MLA is not supported for window_left"}));
  EXPECT_EQ(mla.why_not(&AttentionConfig::window_right, 0),
            (Names{"MLA is not supported for window_right"}));
  EXPECT_EQ(mla.why_not(&AttentionConfig::alibi_slopes, {0.5F}),
            (Names{"MLA is not supported for alibi_slopes"}));
  EXPECT_EQ(mla.why_not(&AttentionConfig::sinks, {0.0F}),
            (Names{"MLA is not supported for sinks"}));
  EXPECT_EQ(mla.why_not(&AttentionConfig::logits_soft_cap, 30),
            (Names{"MLA is not supported for logits_soft_cap"}));
  EXPECT_EQ(mla.why_not(&AttentionConfig::attn_type, clattn::AttentionType::kEncoder),
            (Names{"MLA is not supported for attn_type encoder"}));
  EXPECT_EQ(mla.why_not(&AttentionConfig::dtype, DType::kInt8),
            (Names{"dtype int8 not supported: f32, f16 and bf16 are"}));
  EXPECT_EQ(mla.why_not(&AttentionConfig::block_size, 3), Names{});
  EXPECT_EQ(mla.why_not(&AttentionConfig::head_size, 576), Names{});
  EXPECT_EQ(mla.why_not(&AttentionConfig::head_size, 584),
            (Names{"head_size 584 not supported: rope_dim (64) more than 16 … 512 in steps of 16 "
                   "are"}));
  EXPECT_EQ(mla.why_not(&AttentionConfig::head_size, 64).size(), 1U);  // no latent part
  EXPECT_EQ(mla.get_supported_head_sizes().front(), 80);
  EXPECT_EQ(mla.get_supported_head_sizes().back(), 576);
  EXPECT_EQ(on_no_device(mla).size(), 2U);
  AttentionConfig config;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_size = 2000;
  config.rope_dim = 12;
  config.use_mla = true;
  config.attention_chunk_size = 16;
  config.chunk_lookback = 1;
  config.custom_mask = config.output_fp8 = true;
  EXPECT_EQ(mla.validate_configuration(config, nullptr),
            (Names{"num_kv_heads is 2, supported: 1",
                   "head_size 2000 not supported: rope_dim (12) more than 16 … 512 in steps of 16 "
                   "are",
                   "rope_dim is 12, supported: 8 … 64 in steps of 8",
                   "MLA is not supported for attention_chunk_size",
                   "MLA is not supported for custom_mask", "MLA is not supported for output_fp8",
                   "MLA is not supported for chunk_lookback"}));
}

}  // namespace
