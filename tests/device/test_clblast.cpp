// The backend CLBLAST (A8: chosen by name or where nothing else fits) against the oracle, which
// keys and values of NaN or inf reach, and what it refuses. Built without CLBlast, it says so.

#include <gtest/gtest.h>

#include <clattn/clattn.hpp>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "device/attention_case.hpp"
#include "support/error_text.hpp"

namespace {

using attention_test::all_contexts;
using attention_test::CaseSpec;
using clattn::AttentionConfig;
using clattn::AttentionType;
using clattn::DType;
using test::error_text;

AttentionConfig small_config() {
  AttentionConfig config;
  config.num_heads = 6;
  config.num_kv_heads = 2;
  config.head_size = 40;
  config.block_size = 8;
  config.dtype = DType::kF32;
  return config;
}

/// Decodes, a chunk over a history, a fresh prompt, and an empty request between.
CaseSpec ragged_case() {
  CaseSpec spec;
  spec.backend = "CLBLAST";
  spec.config = small_config();
  spec.requests = {{1, 70}, {1, 0}, {0, 9}, {17, 30}, {23, 0}};
  spec.unseen_is_nan = true;
  return spec;
}

/// Without a cache, keys as many as queries, more or fewer, and none; with one the same pages.
CaseSpec encoder_case(AttentionType attn_type, std::int32_t block_size) {
  CaseSpec spec = ragged_case();
  spec.config.attn_type = attn_type;
  spec.config.block_size = block_size;
  spec.requests = {{23, 0}, {0, 0}, {9, 0}, {1, 0}};
  if (attn_type == AttentionType::kEncoderDecoder)
    spec.requests = {{1, 40}, {3, -3}, {0, 9}, {17, -5}, {5, 30}};
  return spec;
}

void check(const CaseSpec& spec) {
  for (const auto& context : all_contexts()) {
    SCOPED_TRACE(attention_test::describe(spec));
    const auto result = attention_test::run_case(context, spec);
    EXPECT_EQ(result.fault, "");
    EXPECT_LE(result.worst_share, 1.0) << result.worst_place;
    EXPECT_FALSE(result.out.empty());
  }
}

const clattn::AttentionBackend& backend() {
  for (const auto* each : clattn::list_attn_backends()) {
    if (each->name() == "CLBLAST") return *each;
  }
  throw std::runtime_error("CLBLAST is not in the list");
}

/// Whether the library has it; else what is left to say is why not.
bool is_built() {
  const auto reasons = backend().validate_configuration(small_config(), nullptr);
  if (reasons.empty()) return true;
  EXPECT_EQ(reasons, (std::vector<std::string>{"built without CLBlast (CMake: CLATTN_CLBLAST)"}));
  return false;
}

TEST(Clblast, BatchesOfEveryKind) {
  if (!is_built()) return;
  CaseSpec uniform = ragged_case();
  uniform.requests = {{1, 40}, {1, 40}, {1, 40}};
  check(uniform);
  CaseSpec ragged = ragged_case();
  check(ragged);
  ragged.causal = false;
  check(ragged);
  ragged.causal = true;
  ragged.write_cache = true;
  ragged.query_padding = 16;
  check(ragged);
  CaseSpec mha = ragged_case();
  mha.config.num_kv_heads = 6;
  mha.layout = clattn::KVCacheLayout::kNHD;
  check(mha);
}

TEST(Clblast, TokensWhoseScoresDoNotFitAtOnce) {
  if (!is_built()) return;
  CaseSpec spec = ragged_case();
  spec.config.num_heads = 16;
  spec.config.head_size = 8;
  spec.requests = {{1, 20}, {80, 4000}};  // 65 tokens at a time
  check(spec);
}

// A2.8: bidirectional self-attention without a cache, cross attention over tensors and over pages.
TEST(Clblast, A2_8_EncodersAndCrossAttention) {
  if (!is_built()) return;
  for (const auto& [type, block_size] : {std::pair{AttentionType::kEncoder, 16},
                                         {AttentionType::kEncoderOnly, 0},
                                         {AttentionType::kEncoderDecoder, 0},
                                         {AttentionType::kEncoderDecoder, 8}}) {
    CaseSpec spec = encoder_case(type, block_size);
    check(spec);
    spec.config.dtype = DType::kF16;
    spec.config.num_kv_heads = 3;
    spec.config.sliding_window = 7;
    spec.config.sinks = {0, 1, -2, 3, 0.5F, -1};
    spec.config.alibi_slopes = {0.5F, 0.25F, 0.1F, 0.7F, 1, 0.01F};
    spec.config.custom_mask = true;
    spec.query_padding = 8;
    check(spec);
  }
}

TEST(Clblast, AnOverflowedTokenHarmsNoRowThatDoesNotSeeIt) {
  if (!is_built()) return;
  CaseSpec spec = ragged_case();
  spec.requests = {{2, 130}, {7, 20}, {35, 4}};  // every row sees a sound key too
  spec.last_token_overflows = true;
  check(spec);
  spec.first_token_overflows = true;
  spec.config.sliding_window = 9;
  check(spec);
  spec.config.sliding_window = 0;
  spec.config.attention_chunk_size = 12;
  check(spec);
  spec.config.attention_chunk_size = 0;
  spec.config.custom_mask = true;
  spec.requests = {{4, 130}, {35, 30}};
  check(spec);
}

// What a row does see stays what it is: NaN among the values of its keys is NaN in its output.
TEST(Clblast, SeenNaNIsNotHidden) {
  if (!is_built()) return;
  CaseSpec spec = ragged_case();
  spec.first_token_overflows = true;
  spec.requests = {{1, 9}};
  for (const auto& context : all_contexts()) {
    const auto result = attention_test::run_case(context, spec);
    for (const double x : result.out) EXPECT_FALSE(std::isfinite(x));
  }
}

TEST(Clblast, TypesOfTensorsAndCaches) {
  if (!is_built()) return;
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const auto cache : {dtype, DType::kFp8E4M3, DType::kFp8E5M2, DType::kInt8}) {
      CaseSpec spec = ragged_case();
      spec.config.dtype = dtype;
      spec.config.kv_cache_dtype = cache;
      spec.scales_per_head = cache == DType::kFp8E4M3;
      spec.requests = {{1, 30}, {5, 9}};
      check(spec);
    }
  }
}

// A0: each option alone and all together.
TEST(Clblast, OptionsOfTheLogits) {
  if (!is_built()) return;
  using Change = void (*)(AttentionConfig&);
  const Change changes[] = {
      [](AttentionConfig& c) { c.sliding_window = 9; },
      [](AttentionConfig& c) { c.attention_chunk_size = 12; },
      [](AttentionConfig& c) { c.logits_soft_cap = 2; },
      [](AttentionConfig& c) { c.alibi_slopes = {0.5F, 0.25F, 0.1F, 0.7F, 1, 0.01F}; },
      [](AttentionConfig& c) { c.sinks = {0, 1, -2, 3, 0.5F, -1}; },
      [](AttentionConfig& c) { c.custom_mask = true; }};
  CaseSpec all = ragged_case();
  for (const Change change : changes) {
    CaseSpec spec = ragged_case();
    change(spec.config);
    check(spec);
    change(all.config);
  }
  all.config.scale = 0.3F;
  check(all);
}

// A8: refusals say why; a decoder that a tuned kernel takes is never given to it.
TEST(Clblast, A8_IsTheLastChoiceAndSaysWhatItDoesNotTake) {
  AttentionConfig config = small_config();
  EXPECT_EQ(clattn::get_attn_backend(config, nullptr).name(), "FLASHINFER");
  if (!is_built()) return;
  EXPECT_EQ(clattn::get_attn_backend(config, nullptr, "CLBLAST").name(), "CLBLAST");
  config.head_size = 300;
  config.output_fp8 = config.use_batch_invariant = config.use_mla = true;
  config.kernel_family = clattn::KernelFamily::kCpu;
  EXPECT_EQ(backend().validate_configuration(config, nullptr),
            (std::vector<std::string>{
                "head_size 300 not supported: 8 … 256 in steps of 8 are", "MLA not supported",
                "output_fp8 not supported",
                "batch invariance not supported: CLBlast chooses its kernels by the step's sizes",
                "kernel_family not supported: the kernels are CLBlast's"}));
}

// A8: where no prefill kernel runs by what the device reports, encoders go to it; with a name it
// serves anywhere.
TEST(Clblast, A8_IsTheFirstAnswerForEncodersWithoutATunedKernel) {
  if (!is_built()) return;
  clattn::DeviceCapabilities small;
  small.name = "small";
  small.kind = clattn::DeviceKind::kGpu;
  small.max_work_group_size = 32;  // the smallest prefill tile asks for 64
  clattn::DeviceCapabilities large = small;
  large.max_work_group_size = 256;
  for (const auto type :
       {AttentionType::kEncoder, AttentionType::kEncoderOnly, AttentionType::kEncoderDecoder}) {
    AttentionConfig config = small_config();
    config.attn_type = type;
    if (type == AttentionType::kEncoderDecoder) config.block_size = 0;
    EXPECT_EQ(clattn::get_attn_backend(config, &small).name(), "CLBLAST");
    EXPECT_EQ(clattn::get_attn_backend(config, &large).name(), "FLASHINFER");
    EXPECT_EQ(clattn::get_attn_backend(config, &large, "CLBLAST").name(), "CLBLAST");
  }
}

TEST(Clblast, ChecksWhatItsCallsAreGiven) {
  if (!is_built()) return;
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  const auto impl = backend().make_impl(context, small_config());
  clattn::BuilderOptions options;
  options.graph_batch_size = 2;
  EXPECT_EQ(error_text([&] { backend().make_builder(context, small_config(), options); },
                       clattn::ErrorCode::kUnsupported),
            "backend CLBLAST: graph_batch_size is not 0, which CLBlast's own launches do not "
            "follow");
  const std::vector<std::int32_t> starts = {0, 1}, lens = {9}, table = {2, 1};
  const auto batch = clattn::CommonAttentionMetadata::of(starts, lens, table);
  const auto builder = backend().make_builder(context, small_config());
  const auto& metadata = builder->build(queue, batch);
  EXPECT_EQ(builder->workspace_bytes(batch), (2 * 9 * 2 * 40 + 2 * 6 * 40 + 6 * 9) * 4U);
  const clattn::KVCache cache = make_kv_cache(*context, queue, backend(), small_config(), 2);
  const clattn::Buffer rows = context->allocate(6 * 40 * 4);
  const auto forward = [&](const clattn::AttentionMetadata& built) {
    return error_text(
        [&] { impl->forward(queue, {rows.handle()}, cache, built, {rows.handle()}); });
  };
  EXPECT_EQ(forward(metadata),
            "attn_metadata: its block ids reach up to 2, legal: below the cache's 2 blocks");
  const auto stranger = clattn::get_attn_backend(small_config(), nullptr, "FLASHINFER")
                            .make_builder(context, small_config());
  EXPECT_EQ(forward(stranger->build(queue, batch)).find("attn_metadata: built for another"), 0U);
  clattn::GraphCapture capture(queue);
  EXPECT_EQ(
      error_text([&] { impl->forward(queue, {rows.handle()}, cache, metadata, {rows.handle()}); },
                 clattn::ErrorCode::kUnsupported),
      "graph capture: backend CLBLAST cannot be recorded");
  EXPECT_EQ(capture.end().num_launches(), 0U);
  queue.finish();
}

}  // namespace
