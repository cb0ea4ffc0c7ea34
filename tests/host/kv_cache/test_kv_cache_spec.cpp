#include <gtest/gtest.h>

#include <array>
#include <clattn/clattn.hpp>
#include <clattn/compat/vllm_layer.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <clattn/registry.hpp>
#include <functional>
#include <string>
#include <vector>

namespace {

using clattn::KVCacheKind;
using clattn::KVCacheSpec;

KVCacheSpec spec(KVCacheKind kind) {
  KVCacheSpec s;
  s.kind = kind;
  s.block_size = 16;
  s.num_kv_heads = 8;
  s.head_size = 128;
  s.dtype = clattn::DType::kBF16;
  return s;
}

constexpr std::size_t kPage =
    65536;  // 2 * 16 * 8 * 128 * 2: the worked example of vLLM's documentation

TEST(KVCacheSpec, PageSizeOfTheWorkedExample) {
  EXPECT_EQ(spec(KVCacheKind::kFull).page_size_bytes(), kPage);
  KVCacheSpec f32 = spec(KVCacheKind::kFull);
  f32.dtype = clattn::DType::kF32;
  EXPECT_EQ(f32.page_size_bytes(), 2 * kPage);
}

TEST(KVCacheSpec, MostMemoryOfARequestByKind) {
  EXPECT_EQ(spec(KVCacheKind::kFull).max_memory_usage_bytes(100, 8192), 7 * kPage);
  KVCacheSpec window = spec(KVCacheKind::kSlidingWindow);
  window.sliding_window = 64;
  // cdiv(min(63 + 32, 1000), 16) + 1
  EXPECT_EQ(window.max_memory_usage_bytes(1000, 32), 7 * kPage);
  EXPECT_EQ(window.max_memory_usage_bytes(20, 32), 3 * kPage);
  KVCacheSpec chunked = spec(KVCacheKind::kChunkedLocal);
  chunked.attention_chunk_size = 64;
  EXPECT_EQ(chunked.max_memory_usage_bytes(1000, 32), 6 * kPage);
  EXPECT_EQ(spec(KVCacheKind::kEncoderOnly).max_memory_usage_bytes(1000, 32), 0U);
  EXPECT_EQ(spec(KVCacheKind::kCross).max_memory_usage_bytes(1000, 32, 17), 2 * kPage);
}

TEST(KVCacheSpec, S5_MostBlocksOfARequest) {
  KVCacheSpec window = spec(KVCacheKind::kSlidingWindow), chunked = window;
  window.sliding_window = 64;
  EXPECT_EQ(window.max_admission_blocks_per_request(1000, 32), 7);
  chunked.kind = KVCacheKind::kChunkedLocal;
  chunked.attention_chunk_size = 64;
  EXPECT_EQ(chunked.max_admission_blocks_per_request(1000, 32), 6);
  EXPECT_EQ(chunked.max_admission_blocks_per_request(40, 32), 3);
  EXPECT_EQ(spec(KVCacheKind::kFull).max_admission_blocks_per_request(100, 8192), 7);
}

TEST(KVCacheSpec, S5_KindsByVllmsNames) {
  KVCacheSpec latent = spec(KVCacheKind::kFull);
  latent.use_mla = true;
  EXPECT_EQ(get_kv_cache_spec_kind(latent), "mla_attention");
  EXPECT_EQ(get_kv_cache_spec_kind(spec(KVCacheKind::kFull)), "full_attention");
  EXPECT_EQ(get_kv_cache_spec_kind(spec(KVCacheKind::kSlidingWindow)), "sliding_window");
  EXPECT_EQ(get_kv_cache_spec_kind(spec(KVCacheKind::kChunkedLocal)), "chunked_local_attention");
  EXPECT_EQ(get_kv_cache_spec_kind(spec(KVCacheKind::kEncoderOnly)), "encoder_only_attention");
  EXPECT_EQ(get_kv_cache_spec_kind(spec(KVCacheKind::kCross)), "cross_attention");
  EXPECT_EQ(get_kv_cache_spec_kind(spec(KVCacheKind::kMamba)), "mamba");
}

void expect_error(const std::function<void()>& call, const std::string& text) {
  try {
    call();
    FAIL() << "no error; expected: " << text;
  } catch (const clattn::Error& error) {
    EXPECT_EQ(error.code(), clattn::ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(KVCacheSpec, BadFieldsAreNamed) {
  KVCacheSpec bad = spec(KVCacheKind::kFull);
  bad.block_size = 0;
  expect_error([&] { (void)bad.page_size_bytes(); }, "block_size is 0, legal: >= 1");
  bad = spec(KVCacheKind::kFull);
  bad.num_kv_heads = bad.head_size = bad.block_size = INT32_MAX;
  expect_error([&] { (void)bad.page_size_bytes(); }, "overflows");
  expect_error([&] { (void)spec(KVCacheKind::kSlidingWindow).max_memory_usage_bytes(10, 10); },
               "sliding_window is 0");
  expect_error([&] { (void)spec(KVCacheKind::kFull).max_memory_usage_bytes(-1, 10); },
               "max_model_len -1");
}

TEST(KVCacheSpec, A7_MLAKeepsOneVector) {
  KVCacheSpec mla{.block_size = 64, .num_kv_heads = 1, .head_size = 576, .use_mla = true};
  EXPECT_EQ(mla.page_size_bytes(), 64U * 576 * 2);
  EXPECT_EQ(mla.max_memory_usage_bytes(100, 8192), 2U * 64 * 576 * 2);
  mla.kind = KVCacheKind::kSlidingWindow;
  mla.sliding_window = 8;
  expect_error([&] { (void)mla.page_size_bytes(); }, "MLA is not supported for sliding window");
  expect_error([&] { (void)mla.max_memory_usage_bytes(1, 1); },
               "MLA is not supported for sliding window");
  mla.kind = KVCacheKind::kFull;
  mla.num_kv_heads = 2;
  expect_error([&] { (void)mla.page_size_bytes(); }, "num_kv_heads is 2, legal: 1 (use_mla)");
  mla.num_kv_heads = 1;
  mla.head_size_v = 512;
  expect_error([&] { (void)mla.page_size_bytes(); }, "head_size_v is 512, legal: 0 (use_mla");
}

TEST(KVCacheSpec, A7_WidthsScalesAndPadding) {
  KVCacheSpec wide = spec(KVCacheKind::kFull);
  wide.head_size_v = 64;
  EXPECT_EQ(wide.page_size_bytes(), 16U * 8 * (128 + 64) * 2);
  wide.head_size_v = -1;
  expect_error([&] { (void)wide.page_size_bytes(); }, "head_size_v is -1, legal: >= 0");

  // One f32 behind each head vector: D + 4 bytes for int8.
  KVCacheSpec quantized = spec(KVCacheKind::kFull);
  quantized.kv_quant_mode = clattn::KVQuantMode::kPerTokenHead;
  expect_error([&] { (void)quantized.page_size_bytes(); },
               "dtype is bf16, legal: a type of a byte (kv_quant_mode kPerTokenHead)");
  for (const auto dtype :
       {clattn::DType::kInt8, clattn::DType::kFp8E4M3, clattn::DType::kFp8E5M2}) {
    quantized.dtype = dtype;
    EXPECT_EQ(quantized.page_size_bytes(), 2U * 16 * 8 * (128 + 4));
  }
  KVCacheSpec halves = quantized;  // two codes a byte
  halves.dtype = clattn::DType::kUInt4x2;
  EXPECT_EQ(halves.page_size_bytes(), 2U * 16 * 8 * (64 + 4));
  halves.head_size = 5;
  expect_error([&] { (void)halves.page_size_bytes(); },
               "head_size is 5, head_size_v 0, legal with dtype uint4x2: multiples of 2");
  halves.head_size = 128;
  halves.kv_quant_mode = clattn::KVQuantMode::kNone;
  expect_error([&] { (void)halves.page_size_bytes(); },
               "kv_quant_mode is kNone, legal with dtype uint4x2: kPerTokenHead");
  quantized.use_mla = true;
  quantized.num_kv_heads = 1;
  EXPECT_EQ(quantized.page_size_bytes(), 16U * (128 + 4));

  KVCacheSpec padded = spec(KVCacheKind::kFull);
  padded.page_size_padded = kPage + 512;
  EXPECT_EQ(padded.page_size_bytes(), kPage + 512);
  EXPECT_EQ(padded.max_memory_usage_bytes(17, 1), 2 * (kPage + 512));
  padded.page_size_padded = kPage - 1;
  expect_error([&] { (void)padded.page_size_bytes(); },
               "page_size_padded is 65535, legal: 0 or >= 65536");
}

TEST(KVCacheSpec, A7_MostMemoryNeverOverflowsSilently) {
  EXPECT_EQ(spec(KVCacheKind::kEncoderOnly).max_memory_usage_bytes(INT64_MAX, INT64_MAX), 0U);
  expect_error([] { (void)spec(KVCacheKind::kFull).max_memory_usage_bytes(INT64_MAX, 1); },
               "max_memory_usage_bytes");
  KVCacheSpec window = spec(KVCacheKind::kSlidingWindow);
  window.sliding_window = 64;
  expect_error([&] { (void)window.max_memory_usage_bytes(INT64_MAX, INT64_MAX); }, "overflows");
}

TEST(KVCacheSpec, A7_MergeOfEqualSpecs) {
  for (const auto kind : {KVCacheKind::kFull, KVCacheKind::kSlidingWindow,
                          KVCacheKind::kChunkedLocal, KVCacheKind::kCross}) {
    KVCacheSpec each = spec(kind);
    each.sliding_window = kind == KVCacheKind::kSlidingWindow ? 64 : 0;
    EXPECT_EQ(KVCacheSpec::merge(std::vector(3, each)), each);
  }
  expect_error([] { (void)KVCacheSpec::merge({}); }, "merge of no specs");
}

void expect_unlike(const KVCacheSpec& one, const KVCacheSpec& other, const std::string& detail) {
  expect_error(
      [&] {
        (void)KVCacheSpec::merge(std::vector{one, other});
      },
      "All layers in the same KV cache group must be the same. (" + detail);
}

TEST(KVCacheSpec, A7_MergeRefusesDifferentLayers) {
  const KVCacheSpec full = spec(KVCacheKind::kFull);
  const auto with = [&](auto change) {
    KVCacheSpec other = full;
    change(other);
    return other;
  };
  expect_unlike(full, with([](KVCacheSpec& s) { s.kind = KVCacheKind::kCross; }), "kind: 4 of");
  expect_unlike(full, with([](KVCacheSpec& s) { s.block_size = 32; }),
                "block_size: 32 of layer 1, 16 of layer 0)");
  expect_unlike(full, with([](KVCacheSpec& s) { s.num_kv_heads = 4; }), "num_kv_heads: 4 of");
  expect_unlike(full, with([](KVCacheSpec& s) { s.head_size = 64; }), "head_size: 64 of");
  expect_unlike(full, with([](KVCacheSpec& s) { s.dtype = clattn::DType::kF16; }), "dtype: 1 of");
  expect_unlike(full, with([](KVCacheSpec& s) { s.use_mla = true; }), "use_mla: 1 of");
  expect_unlike(full, with([](KVCacheSpec& s) { s.head_size_v = 64; }), "head_size_v: 64 of");
  expect_unlike(full, with([](KVCacheSpec& s) { s.page_size_padded = 99999; }),
                "page_size_padded: 99999 of");
  expect_unlike(full,
                with([](KVCacheSpec& s) { s.kv_quant_mode = clattn::KVQuantMode::kPerTokenHead; }),
                "kv_quant_mode: 1 of");
  EXPECT_EQ(
      KVCacheSpec::merge(std::vector{full, with([](KVCacheSpec& s) { s.head_size_v = 128; })}),
      full);
  KVCacheSpec window = spec(KVCacheKind::kSlidingWindow), other = window;
  window.sliding_window = 64;
  other.sliding_window = 128;
  expect_unlike(window, other, "sliding_window: 128 of");
}

// Layers of other sizes under one block table: a block takes a page of each.
TEST(KVCacheGroupSpec, S5_UniformTypesShareABlockTable) {
  clattn::KVCacheGroupSpec group{{"wide", "narrow", "plain"}, spec(KVCacheKind::kSlidingWindow)};
  group.spec.sliding_window = 64;
  EXPECT_EQ(group.page_size_bytes(), 3 * kPage);
  KVCacheSpec wide = group.spec, narrow = group.spec;
  wide.head_size = 256;
  narrow.num_kv_heads = 1;
  group.layer_specs = {{"wide", wide}, {"narrow", narrow}};
  EXPECT_EQ(group.spec_of("wide"), wide);
  EXPECT_EQ(group.spec_of("plain"), group.spec);
  EXPECT_EQ(group.page_size_bytes(), 2 * kPage + kPage / 8 + kPage);
  EXPECT_EQ(group.max_memory_usage_bytes(1000, 32), 7 * group.page_size_bytes());
  const auto refuse = [&](auto change, const std::string& text) {
    clattn::KVCacheGroupSpec other = group;
    change(other.layer_specs.at("wide"));
    expect_error([&] { (void)other.spec_of("plain"); },
                 "KVCacheGroupSpec: layer 'wide' has " + text);
  };
  refuse([](KVCacheSpec& s) { s.kind = KVCacheKind::kFull; }, "kind full, legal: spec's sliding_");
  refuse([](KVCacheSpec& s) { s.block_size = 32; }, "block_size 32, legal: spec's 16");
  refuse([](KVCacheSpec& s) { s.sliding_window = 32; }, "sliding_window 32, legal: spec's 64");
  refuse([](KVCacheSpec& s) { s.attention_chunk_size = 8; },
         "attention_chunk_size 8, legal: spec's 0");
  group.layer_specs["none"] = wide;
  expect_error([&] { (void)group.page_size_bytes(); },
               "KVCacheGroupSpec: layer_specs has a layer 'none', legal: layer_names");
}

TEST(KVCacheSpec, A7_MergeOfFullLayersKeepsTheOneWindow) {
  const KVCacheSpec plain = spec(KVCacheKind::kFull);
  KVCacheSpec window = plain, other = plain, chunked = plain;
  window.sliding_window = 64;
  other.sliding_window = 128;
  chunked.attention_chunk_size = 64;
  EXPECT_EQ(KVCacheSpec::merge(std::vector{plain, window, plain, window}), window);
  EXPECT_EQ(KVCacheSpec::merge(std::vector{chunked, plain}), chunked);
  EXPECT_EQ(window.max_memory_usage_bytes(100, 1), 7 * kPage);  // all tokens stay
  expect_error(
      [&] {
        (void)KVCacheSpec::merge(std::vector{window, plain, other});
      },
      "All attention layers in the same KV cache group must have the same window size.");
  expect_error(
      [&] {
        (void)KVCacheSpec::merge(std::vector{window, chunked});
      },
      "Model with both sliding window layers and chunked local attention layers is not "
      "supported.");
}

TEST(KVCacheSpec, PagesThatKernelsCannotViewAreRefused) {
  const KVCacheSpec plain = spec(KVCacheKind::kFull);
  KVCacheSpec mla = plain, wide = plain, scaled = plain, padded = plain, same = plain;
  KVCacheSpec latent_rows = plain, other_codes = plain;
  mla.use_mla = true;
  mla.num_kv_heads = 1;
  wide.head_size_v = wide.head_size + 8;
  scaled.dtype = clattn::DType::kInt8;
  scaled.kv_quant_mode = clattn::KVQuantMode::kPerTokenHead;
  other_codes = scaled;
  other_codes.dtype = clattn::DType::kFp8E5M2;
  latent_rows = scaled;
  latent_rows.use_mla = true;
  latent_rows.num_kv_heads = 1;
  padded.page_size_padded = 2 * kPage;
  same.head_size_v = same.head_size;
  const auto code_of = [](const KVCacheSpec& each) {
    try {
      (void)clattn::reshape_kv_cache({}, each, *clattn::list_attn_backends()[0],
                                     clattn::KVCacheLayout::kNHD);
    } catch (const clattn::Error& error) {
      return error.code();
    }
    return clattn::ErrorCode::kIo;
  };
  for (const KVCacheSpec& each : {mla, wide, other_codes, latent_rows}) {
    EXPECT_EQ(code_of(each), clattn::ErrorCode::kUnsupported);
  }
  // These are refused for the buffer, which is empty, alone.
  EXPECT_EQ(code_of(plain), clattn::ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(scaled), clattn::ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(padded), clattn::ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(same), clattn::ErrorCode::kInvalidArgument);
  // Latent rows are for the backend that has them, which has no others.
  const auto& latent = *clattn::list_attn_backends()[2];
  expect_error(
      [&] { (void)clattn::reshape_kv_cache({}, mla, latent, clattn::KVCacheLayout::kNHD); },
      "buffer of 0 bytes");
}

// A7: a Mamba layer's page holds its states, one behind the other.
KVCacheSpec states(std::vector<clattn::StateTensor> tensors) {
  KVCacheSpec s;
  s.kind = KVCacheKind::kMamba;
  s.states = std::move(tensors);
  return s;
}

TEST(KVCacheSpec, A7_PagesOfStates) {
  KVCacheSpec mamba = states({{{3, 96}, clattn::DType::kBF16}, {{4, 8, 16}, clattn::DType::kF32}});
  constexpr std::size_t kStates = 3 * 96 * 2 + 4 * 8 * 16 * 4;
  EXPECT_EQ(mamba.page_size_bytes(), kStates);
  EXPECT_EQ(mamba.max_memory_usage_bytes(1 << 20, 8192), kStates);
  mamba.page_size_padded = 4096;
  EXPECT_EQ(mamba.page_size_bytes(), 4096U);
  EXPECT_EQ(mamba.max_memory_usage_bytes(1, 1), 4096U);
  EXPECT_EQ(KVCacheSpec::merge(std::vector{mamba, mamba}), mamba);
  KVCacheSpec other = mamba;
  other.states[0].shape[0] = 4;
  expect_error(
      [&] {
        KVCacheSpec::merge(std::vector{mamba, other});
      },
      "All layers in the same KV cache group must be the same. (states)");
  mamba.page_size_padded = 100;
  expect_error([&] { (void)mamba.page_size_bytes(); }, "page_size_padded is 100, legal: 0 or >= ");
  expect_error([&] { (void)states({}).page_size_bytes(); }, "0 states, legal: at least 1 (kMamba)");
  expect_error([&] { (void)states({{{2, 0}}}).page_size_bytes(); }, "states: shape is 0");
  KVCacheSpec keys = spec(KVCacheKind::kFull);
  keys.states = other.states;
  expect_error([&] { (void)keys.page_size_bytes(); }, "2 states, legal: 0 (other kinds)");
}

// MambaSpec.max_memory_usage_bytes, by mode.
TEST(KVCacheSpec, A7_PagesOfStatesThatStay) {
  KVCacheSpec mamba = states({{{8}}});
  mamba.block_size = 100;
  mamba.num_speculative_blocks = 3;
  const auto pages = [&](std::string_view mode) {
    mamba.mamba_cache_mode = clattn::parse_mamba_cache_mode(mode);
    EXPECT_EQ(to_string(mamba.mamba_cache_mode), mode);
    EXPECT_EQ(mamba.max_memory_usage_bytes(1001, 8192),
              32 * static_cast<std::size_t>(mamba.max_admission_blocks_per_request(1001, 8192)));
    return mamba.max_admission_blocks_per_request(1001, 8192);
  };
  EXPECT_EQ(pages("none"), 1 + 3);
  EXPECT_EQ(pages("align"), 2 + 3);
  EXPECT_EQ(pages("all"), 11 + 3);
  KVCacheSpec other = mamba;
  other.num_speculative_blocks = 2;
  expect_error(
      [&] {
        KVCacheSpec::merge(std::vector{mamba, other});
      },
      "(num_speculative_blocks: 2 of layer 1, 3 of layer 0)");
  other.num_speculative_blocks = -1;
  expect_error([&] { (void)other.page_size_bytes(); }, "num_speculative_blocks is -1, legal: >= 0");
  KVCacheSpec keys = spec(KVCacheKind::kFull);
  keys.mamba_cache_mode = clattn::MambaCacheMode::kAlign;
  expect_error([&] { (void)keys.page_size_bytes(); },
               "mamba_cache_mode is align, legal: none (other kinds than kMamba)");
  keys.mamba_cache_mode = clattn::MambaCacheMode::kNone;
  keys.num_speculative_blocks = 1;
  expect_error([&] { (void)keys.page_size_bytes(); },
               "num_speculative_blocks is 1, legal: 0 (other kinds than kMamba)");
  expect_error([] { clattn::parse_mamba_cache_mode("some"); },
               "mamba_cache_mode: 'some' is not one of none, align, all");
}

// Platform._align_hybrid_block_size, of Qwen 3.5 4B and 27B: bf16 keys, a state of f32.
TEST(UnifyPages, A7_BlocksOfHybridModelsAreVllms) {
  for (const auto& [v_heads, kv_heads, tokens] :
       {std::array<std::int32_t, 3>{32, 4, 528}, std::array<std::int32_t, 3>{48, 4, 784}}) {
    KVCacheSpec keys = spec(KVCacheKind::kFull);
    keys.num_kv_heads = kv_heads;
    keys.head_size = 256;
    keys.dtype = clattn::DType::kBF16;
    const std::int64_t channels = 2 * 16 * 128 + v_heads * 128;
    std::map<std::string, KVCacheSpec> specs = {
        {"full", keys},
        {"delta", states({{{3, channels}, clattn::DType::kBF16},
                          {{v_heads, 128, 128}, clattn::DType::kF32}})}};
    unify_kv_cache_spec_page_size(specs);
    EXPECT_EQ(specs.at("full").block_size, tokens);
    EXPECT_EQ(specs.at("delta").page_size_bytes(), specs.at("full").page_size_bytes());
  }
}

// The unification of vLLM's kv_cache_utils: more tokens a block, or padding.
TEST(UnifyPages, A7_PagesOfAHybridModelBecomeEquallyLarge) {
  KVCacheSpec full = spec(KVCacheKind::kFull), window = spec(KVCacheKind::kSlidingWindow);
  window.sliding_window = 64;
  window.num_kv_heads = 4;  // half a page
  KVCacheSpec odd = full;
  odd.head_size = 96;  // three quarters
  KVCacheSpec latent = full;
  latent.use_mla = true;
  latent.num_kv_heads = 1;
  latent.head_size = 512;  // a quarter
  std::map<std::string, KVCacheSpec> specs = {{"full", full},
                                              {"window", window},
                                              {"odd", odd},
                                              {"latent", latent},
                                              {"state", states({{{1000}}})}};
  auto unified = specs;
  unify_kv_cache_spec_page_size(unified);
  for (const auto& [name, s] : unified) EXPECT_EQ(s.page_size_bytes(), kPage) << name;
  EXPECT_EQ(unified["full"], full);
  EXPECT_EQ(unified["window"].block_size, 32);
  EXPECT_EQ(unified["odd"].page_size_padded, kPage);
  EXPECT_EQ(unified["odd"].block_size, 16);
  EXPECT_EQ(unified["latent"].block_size, 64);
  EXPECT_EQ(unified["state"].page_size_padded, kPage);

  specs["state"] = states({{{50000}}});  // more than three pages of keys and values
  unified = specs;
  unify_kv_cache_spec_page_size(unified);
  for (const auto& [name, s] : unified) EXPECT_EQ(s.page_size_bytes(), 4 * kPage) << name;
  EXPECT_EQ(unified["full"].block_size, 64);
  EXPECT_EQ(unified["window"].block_size, 128);

  specs["latent"].head_size = 576;
  unified = specs;
  expect_error([&] { unify_kv_cache_spec_page_size(unified); },
               "layer 'latent' has latent pages of 18432 bytes, legal: a divisor of the largest "
               "page's 262144");
  EXPECT_EQ(unified, specs);
  std::map<std::string, KVCacheSpec> alone = {{"a", states({{{8}}})}, {"b", states({{{10}}})}};
  unify_kv_cache_spec_page_size(alone);
  EXPECT_EQ(alone["a"].page_size_bytes(), 40U);
}

}  // namespace
