#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/error.hpp>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "program/bench/shapes.hpp"
#include "support/error_text.hpp"

namespace {

using clattn::DType;
using clattn::cli::BenchShape;
using clattn::cli::CacheOp;
using clattn::cli::parse_shapes;

const std::string kModel = "model m num_heads=8 num_kv_heads=2 head_size=64 dtype=bf16\n";

// F6: a few letters stand for many requests, each of which takes memory.
TEST(BenchShapes, F6_AFileIsBoundedByWhatItStandsFor) {
  const auto refusal = [&](const std::string& lines) {
    return test::error_text([&] { parse_shapes(kModel + lines, "s"); });
  };
  std::string batches;
  for (int i = 0; i < 17; ++i) batches += fmt::format("batch b{} 65536q1\n", i);
  EXPECT_EQ(refusal(batches), "s:18: requests: 'more', legal: 1048576 in all rows and batches");
  std::string list = "q1";
  for (int i = 2; i < 40; ++i) list += fmt::format(",65536q1s{}", i);
  EXPECT_EQ(refusal("decode quick " + list + "\n"),
            "s:2: requests: 'more', legal: 1048576 in all rows and batches");
  EXPECT_EQ(refusal("decode quick q1" + std::string(20000, ' ') + "\n"),
            "s:2: a line of 20015 bytes, legal: up to 16384");
}

TEST(BenchShapes, ReadsModelsRowsAndTheirOwnOptions) {
  const auto shapes = parse_shapes(
      "# comment\n" + kModel +
          "decode quick,gpu 4q1s2k # more\n"
          "prefill cpu q512s4k sliding_window=128 sinks=yes num_heads=4\n"
          "model latent num_heads=16 num_kv_heads=1 head_size=576 use_mla=yes rope_dim=64\n"
          "cache cpu q3 kv_cache_dtype=fp8_e4m3 block_size=64\n",
      "f");
  ASSERT_EQ(shapes.size(), 3U);
  EXPECT_EQ(shapes[0].name(), "m/decode/4q1s2k");
  EXPECT_TRUE(shapes[0].in_set("quick") && shapes[0].in_set("gpu") && !shapes[0].in_set("cpu"));
  ASSERT_EQ(shapes[0].num_reqs(), 4);
  EXPECT_EQ(shapes[0].max_query_len(), 1);
  EXPECT_EQ(shapes[0].max_seq_len(), 2048);
  EXPECT_EQ(shapes[0].model.config.cache_dtype(), DType::kBF16);
  EXPECT_EQ(shapes[1].name(), "m/prefill/q512s4k/sliding_window=128/sinks=yes/num_heads=4");
  EXPECT_EQ(shapes[1].model.config.sliding_window, 128);
  EXPECT_EQ(shapes[1].model.config.sinks.size(), 4U);
  EXPECT_EQ(shapes[0].model.config.sliding_window, 0) << "a row's options are its own";
  EXPECT_TRUE(shapes[2].model.config.use_mla);
  EXPECT_EQ(shapes[2].model.config.output_head_size(), 512);
  EXPECT_EQ(shapes[2].model.config.cache_dtype(), DType::kFp8E4M3);
}

TEST(BenchShapes, ValuesOfTheirOwnSizeAreForPromptsWithoutContext) {
  const std::string model =
      "model p num_heads=4 num_kv_heads=4 head_size=192 attn_type=encoder_only head_size_v=128\n";
  const auto shapes = parse_shapes(model + "prefill gpu q4k\n", "f");
  EXPECT_TRUE(shapes.at(0).model.config.contiguous_kv());
  EXPECT_EQ(shapes[0].model.config.output_head_size(), 128);
  const auto refused = [&](const std::string& row) {
    return test::error_text([&] { parse_shapes(model + row, "f"); });
  };
  EXPECT_EQ(refused("decode gpu q1s4k\n"),
            "f:2: attn_type: 'encoder_only', legal: decoder, but in rows of suite prefill");
  EXPECT_EQ(refused("prefill gpu q1ks4k\n"),
            "f:2: batch: 'q1ks4k', legal: with attn_type encoder_only, requests without context");
  EXPECT_EQ(refused("prefill gpu q4k sliding_window=5\n"),
            "f:2: sliding_window: '5', legal: none with attn_type encoder_only");
}

TEST(BenchShapes, ARowMayForceAFamilyOfKernels) {
  const auto shapes =
      parse_shapes(kModel + "decode gpu q1\ndecode gpu q1 kernel_family=gpu\n", "f");
  EXPECT_EQ(shapes.at(0).model.config.kernel_family, clattn::KernelFamily::kAuto);
  EXPECT_EQ(shapes.at(1).model.config.kernel_family, clattn::KernelFamily::kGpu);
  EXPECT_EQ(shapes.at(1).name(), "m/decode/q1/kernel_family=gpu");
}

TEST(BenchShapes, PromptsMayHaveASpanAndRequestsADirection) {
  const auto shapes = parse_shapes(
      kModel + "mixed cpu 2q1s8_q10s16_q9 span=4 directions=yes span_rule=clip_both\n", "f");
  const auto& requests = shapes.at(0).requests;
  using Spans = std::vector<clattn::cli::KeySpan>;
  EXPECT_EQ(requests.at(0).spans, Spans{});
  EXPECT_EQ(requests.at(2).spans, (Spans{{9, 13}}));  // of positions 6 ... 15
  EXPECT_EQ(requests.at(3).spans, (Spans{{3, 7}}));
  for (std::size_t r = 0; r < requests.size(); ++r)
    EXPECT_EQ(requests[r].direction,
              r % 2 == 0 ? clattn::Direction::kBothWays : clattn::Direction::kCausal);
  const auto& config = shapes[0].model.config;
  EXPECT_TRUE(config.use_spans && config.use_directions);
  EXPECT_EQ(config.span_rule, clattn::SpanRule::kClipBoth);

  const auto refused = [&](const std::string& row, const std::string& model = kModel) {
    return test::error_text([&] { parse_shapes(model + row, "f"); });
  };
  EXPECT_EQ(refused("decode gpu q1s4k span=4\n"),
            "f:2: span: '4', legal: 0 in rows without prompts");
  EXPECT_EQ(refused("prefill gpu q3 span=4\n"),
            "f:2: span: '4', legal: at most 3, the new tokens of a prompt");
  EXPECT_EQ(refused("prefill gpu q8 span=-4\n"),
            "f:2: span: '-4', legal: a number of tokens, 0 ... 16777216 (0 = none)");
  EXPECT_EQ(refused("prefill gpu q8 directions=both\n"),
            "f:2: directions: 'both', legal: yes or no");
  EXPECT_EQ(refused("prefill gpu q8 use_directions=yes\n"),
            "f:2: use_directions: 'yes', legal: none, as rows bring no such tensor");
  EXPECT_EQ(refused("lengths gpu q8 span=4\n"), "f:2: span: '4', legal: none in suite lengths");
  EXPECT_EQ(refused("cache gpu q8 directions=yes\n"),
            "f:2: directions: 'yes', legal: none in suite cache");
  EXPECT_EQ(refused("prefill gpu q8 span=4 attention_chunk_size=4\n"),
            "f:2: span: '4', legal: none with attention_chunk_size");
  EXPECT_EQ(refused("prefill gpu q8 directions=yes\n",
                    "model p num_heads=4 num_kv_heads=4 head_size=64 attn_type=encoder_only\n"),
            "f:2: directions: 'yes', legal: none with attn_type encoder_only");
}

TEST(BenchShapes, FirstKeysMayEscapeTheWindow) {
  const auto shapes =
      parse_shapes(kModel + "decode cpu q1s3_q1s100 keep_keys=4 sliding_window=9\n", "f");
  EXPECT_TRUE(shapes.at(0).model.config.use_keep_keys);
  EXPECT_EQ(shapes[0].requests.at(0).keep_keys, 3);
  EXPECT_EQ(shapes[0].requests.at(1).keep_keys, 4);
  const auto refused = [&](const std::string& row) {
    return test::error_text([&] { parse_shapes(kModel + row, "f"); });
  };
  EXPECT_EQ(refused("decode gpu q1 keep_keys=no\n"),
            "f:2: keep_keys: 'no', legal: a number of keys, 0 ... 16777216 (0 = none)");
  EXPECT_EQ(refused("decode gpu q1 keep_keys=4\n"),
            "f:2: keep_keys: '4', legal: 0 without sliding_window and window_left");
  EXPECT_EQ(refused("decode gpu q1 keep_keys=4 window_left=8 alibi_slopes=yes\n"),
            "f:2: keep_keys: '4', legal: 0 in rows with alibi_slopes");
  EXPECT_EQ(refused("cache gpu q1 keep_keys=4 window_left=8\n"),
            "f:2: keep_keys: '4', legal: none in suite cache");
}

TEST(BenchShapes, NewTokensMayBeATree) {
  const auto shapes =
      parse_shapes(kModel + "spec gpu 2q6s40 tree=2\nspec gpu q3 masked_tree=1\n", "f");
  using Parents = std::vector<std::int32_t>;
  for (const auto& request : shapes.at(0).requests)
    EXPECT_EQ(request.parents, (Parents{-1, 0, 0, 1, 1, 2}));
  EXPECT_TRUE(shapes[0].model.config.use_trees && !shapes[0].model.config.custom_mask);
  EXPECT_EQ(shapes.at(1).requests.at(0).parents, (Parents{-1, 0, 1}));
  EXPECT_TRUE(shapes[1].model.config.custom_mask && !shapes[1].model.config.use_trees);

  const auto refused = [&](const std::string& row) {
    return test::error_text([&] { parse_shapes(kModel + row, "f"); });
  };
  EXPECT_EQ(refused("spec gpu q8 tree=-1\n"),
            "f:2: tree: '-1', legal: drafts that each draft has, 0 ... 256 (0 = no tree)");
  EXPECT_EQ(refused("prefill gpu q8 tree=2\n"),
            "f:2: tree: '2', legal: 0 in rows of other suites than spec");
  EXPECT_EQ(refused("spec gpu q8 tree=2 masked_tree=2\n"),
            "f:2: masked_tree: '2', legal: 0 in rows with tree");
  EXPECT_EQ(refused("spec gpu q8 masked_tree=2 window_left=3\n"),
            "f:2: masked_tree: '2', legal: 0 in rows with window_left");
  EXPECT_EQ(refused("spec gpu q257 tree=2\n"),
            "f:2: batch: 'q257', legal: at most 256 new tokens with tree");
}

TEST(BenchShapes, ReadsBatchesAsVllmWritesThemAndPutsDecodesFirst) {
  const auto shapes = parse_shapes(kModel + "mixed cpu 2q2k_q3s5_3q1s1k\n", "f");
  std::vector<std::pair<int, int>> requests;
  for (const auto& request : shapes.at(0).requests)
    requests.emplace_back(request.query_len, request.seq_len);
  const std::vector<std::pair<int, int>> expected = {{1, 1024},    {1, 1024},    {1, 1024},
                                                     {2048, 2048}, {2048, 2048}, {3, 5}};
  EXPECT_EQ(requests, expected);
  EXPECT_EQ(shapes[0].num_tokens(), 3 + 2 * 2048 + 3);
}

TEST(BenchShapes, RowsNameCacheOperationsAndLayouts) {
  const auto shapes = parse_shapes(kModel +
                                       "cache cpu 8q64\ncache cpu 8q64 op=copy_blocks\n"
                                       "cache cpu 8q64 op=append layout=HND\n",
                                   "f");
  EXPECT_EQ(shapes[0].model.op, CacheOp::kWrite);
  EXPECT_EQ(shapes[1].model.op, CacheOp::kCopyBlocks);
  EXPECT_EQ(shapes[2].model.op, CacheOp::kAppend);
  EXPECT_FALSE(shapes[1].model.layout.has_value());
  EXPECT_EQ(shapes[2].model.layout, clattn::KVCacheLayout::kHND);
  EXPECT_EQ(shapes[1].name(), "m/cache/8q64/op=copy_blocks");
}

TEST(BenchShapes, BatchesOfManyPartsHaveNames) {
  const auto shapes = parse_shapes(
      "batch trace q1s374 q1s396_2q1s9\nbatch trace q1s7\n" + kModel + "decode cpu trace\n", "f");
  EXPECT_EQ(shapes.at(0).name(), "m/decode/trace");
  std::vector<int> lengths;
  for (const auto& request : shapes[0].requests) lengths.push_back(request.seq_len);
  EXPECT_EQ(lengths, (std::vector<int>{374, 396, 9, 9, 7}));
}

TEST(BenchShapes, ALineMayListBatches) {
  const auto shapes = parse_shapes(
      kModel + "decode cpu,gpu q1s1k,8q1s2k kv_cache_dtype=int8\ndecode gpu q1s1k\n", "f");
  ASSERT_EQ(shapes.size(), 3U);
  EXPECT_EQ(shapes[0].name(), "m/decode/q1s1k/kv_cache_dtype=int8");
  EXPECT_EQ(shapes[1].name(), "m/decode/8q1s2k/kv_cache_dtype=int8");
  EXPECT_EQ(shapes[1].num_reqs(), 8);
  EXPECT_TRUE(shapes[1].in_set("gpu"));
}

/// The files of bench/shapes/ whose names begin so, by name.
std::map<std::string, std::string> shapes_files(const std::string& begin) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(CLATTN_SOURCE_DIR "/bench/shapes")) {
    const std::string name = entry.path().filename().string();
    if (name.rfind(begin, 0) != 0) continue;
    std::ostringstream text;
    text << std::ifstream(entry.path()).rdbuf();
    files[name] = text.str();
  }
  return files;
}

/// The upstream benchmarks that docs/benchmark.md speaks of: some row of each, by its name.
TEST(BenchShapes, UpstreamBenchmarksAreThere) {
  std::set<std::string> names, suites;
  for (const auto& [file, text] : shapes_files("upstream-")) {
    for (const BenchShape& shape : parse_shapes(text, file)) {
      names.insert(shape.name());
      suites.insert(shape.suite);
    }
  }
  EXPECT_EQ(suites, (std::set<std::string>{"decode", "prefill", "mixed", "spec", "cache"}));
  for (const char* name :
       {"vllm-paged-attention/decode/8q1s4k",
        "vllm-paged-attention/decode/8q1s4k/head_size=112",
        "vllm-paged-attention/decode/8q1s4k/dtype=f32",
        "vllm-standard-attention/prefill/2q1ks4k",
        "vllm-standard-attention/spec/8q8s4k",
        "vllm-standard-decode/decode/q1s512",
        "vllm-standard-decode/decode/256q1s32k",
        "vllm-standard-decode/decode/64q1s4k/num_heads=128",
        "vllm-standard-decode/decode/64q1s4k/num_heads=8/num_kv_heads=1/head_size=64",
        "vllm-standard-prefill/prefill/16q32k",
        "vllm-standard-prefill/prefill/4q2k/num_kv_heads=1",
        "vllm-mla-decode/decode/32q1s32k/num_heads=16",
        "vllm-mla-decode/spec/16q16s4k",
        "vllm-mla-decode/mixed/2q1k_16q4s1k_16q1s1k",
        "vllm-trtllm/decode/256q1s128k",
        "vllm-trtllm/prefill/16q16ks32k",
        "flashinfer-batch-decode/decode/512q1s16k",
        "flashinfer-batch-decode/decode/q1s512/kv_cache_dtype=fp8_e4m3",
        "flashinfer-append/cache/q4993_7q1/op=append/num_heads=8/num_kv_heads=1",
        "flashinfer-samples/decode/16q1s1k/head_size=512",
        "flashinfer-samples/prefill/q1k",
        "flashinfer-batch-attention/mixed/q4ks8k_128q1s8k/num_heads=64",
        "flashinfer-gen-mla/spec/1024q16s8k",
        "flashinfer-hopper/prefill/16q8k/block_size=1",
        "flashinfer-gpt-oss/decode/256q1s16k/sinks=yes",
        "vllm-mla-prefill/mixed/4q2ks4k_32q1s2k",
        "vllm-production-mix/mixed/q769_3q1s6143_2q8s3073_q257s8191",
        "vllm-mla-production-mix/spec/16q8s4k/num_heads=96",
        "flash-attention-holdout/prefill/4q1536s24k",
        "cudnn-llama/spec/128q4s128k/num_heads=8/num_kv_heads=1/kv_cache_dtype=fp8_e4m3",
        "cudnn-gpt-oss-window/prefill/q1ks128k",
        "cudnn-decode-sweep/spec/128q16s128k",
        "cudnn-prefill-sweep-256/prefill/q2ks128k/num_heads=8/num_kv_heads=1",
        "cudnn-training/prefill/2q32k",
        "flash-attention-3/prefill/q16k/num_heads=8/num_kv_heads=8/head_size=256",
        "flash-attention-clc/prefill/8q32s8k/num_kv_heads=1/head_size=96",
        "flash-attention-split-kv/decode/16q1s128k",
        "flash-attention-mla/decode/128q1s64k",
        "xformers-attn-decoding/decode/256q1s256/num_kv_heads=2",
        "xformers-attn-decoding/decode/q1s128k"}) {
    EXPECT_TRUE(names.count(name)) << name;
  }
}

/// A list is worth as much as its source: each model stands behind the files and commits that it
/// was taken from, and each list says what it leaves out.
TEST(BenchShapes, UpstreamBenchmarksNameTheirSources) {
  const std::regex source(R"(# source: [\w.-]+/[\w.-]+ [\w./-]+ [0-9a-f]{8})");
  const auto files = shapes_files("upstream-");
  EXPECT_GE(files.size(), 5U);
  for (const auto& [file, text] : files) {
    bool sourced = false;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      if (line.rfind("# source:", 0) == 0) {
        sourced = std::regex_match(line, source);
        EXPECT_TRUE(sourced) << file << ": " << line;
      }
      const bool model = line.rfind("model ", 0) == 0;
      EXPECT_TRUE(sourced || !model) << file << ": " << line;
    }
    EXPECT_NE(text.find("\n# left out: "), std::string::npos) << file;
  }
}

/// What is measured, whatever its model is called and however its options are spelled.
std::string measured(const BenchShape& shape) {
  const clattn::AttentionConfig& config = shape.model.config;
  return fmt::format(
      "{} {} {}/{} heads of {}+{}, pages of {}, {} {}, scale {}, window {}, cap {}, "
      "{} sinks, layout {}",
      shape.suite, shape.batch, config.num_heads, config.num_kv_heads, config.head_size,
      config.rope_dim, config.block_size, to_string(config.dtype), to_string(config.cache_dtype()),
      config.scale.value_or(0), config.sliding_window, config.logits_soft_cap, config.sinks.size(),
      shape.model.layout ? to_string(*shape.model.layout) : "of the run");
}

TEST(BenchShapes, PeersAreRowsOfUpstreamBenchmarks) {
  std::set<std::string> upstream;
  for (const auto& [file, text] : shapes_files("upstream-")) {
    for (const BenchShape& shape : parse_shapes(text, file)) upstream.insert(measured(shape));
  }
  for (const BenchShape& shape : parse_shapes(shapes_files("peers").at("peers.txt"), "peers.txt")) {
    if (shape.in_set("quick")) continue;
    EXPECT_TRUE(upstream.count(measured(shape))) << shape.name() << ": " << measured(shape);
  }
}

TEST(BenchShapes, RecurrentRowsHaveTheModelsNets) {
  const std::string model =
      "model m num_heads=8 num_kv_heads=2 head_size=64 dtype=bf16 num_k_heads=2 num_v_heads=6 "
      "head_k_dim=64 head_v_dim=32 conv_width=3 full_attention_interval=2 state_dtype=f16\n";
  const auto shapes = parse_shapes(model +
                                       "gdn_decode cpu 3q1s8\ngdn_prefill cpu q8s9_q4 method=loop\n"
                                       "conv cpu q8 dtype=f32 num_v_heads=2\ndecode cpu q1\n",
                                   "s");
  ASSERT_EQ(shapes.size(), 4U);
  const clattn::cli::DeltaNet& net = shapes[0].model.delta_net;
  EXPECT_TRUE(net.exists() && net.in_chunks && shapes[0].is_recurrent());
  EXPECT_EQ(net.channels(), 2 * 2 * 64 + 6 * 32);
  EXPECT_EQ(net.state_elements(), 6 * 64 * 32);
  EXPECT_EQ(net.conv_width, 3);
  EXPECT_EQ(net.full_attention_interval, 2);
  EXPECT_EQ(net.state_dtype, DType::kF16);
  EXPECT_FALSE(shapes[1].model.delta_net.in_chunks);
  EXPECT_EQ(shapes[1].name(), "m/gdn_prefill/q8s9_q4/method=loop");
  EXPECT_EQ(shapes[2].model.delta_net.num_v_heads, 2);
  EXPECT_EQ(shapes[2].model.config.dtype, DType::kF32);
  EXPECT_FALSE(shapes[3].is_recurrent());
  const auto refusal = [&](const std::string& line) {
    return test::error_text([&] { parse_shapes(model + line, "s"); });
  };
  EXPECT_EQ(refusal("gdn_decode cpu q2s8\n"),
            "s:2: batch: 'q2s8', legal: in suite gdn_decode one new token a request");
  EXPECT_EQ(refusal("gdn_decode cpu q1 method=loop\n"),
            "s:2: method: 'loop', legal: in rows of suite gdn_prefill");
  EXPECT_EQ(refusal("conv cpu q8 sliding_window=4\n"),
            "s:2: sliding_window: '4', legal: none in rows of suite conv");
  EXPECT_EQ(refusal("decode cpu q1 num_k_heads=1\n"),
            "s:2: num_k_heads: '1', legal: none in rows of suite decode");
  EXPECT_EQ(refusal("gdn_decode cpu q1 num_v_heads=5\n"),
            "s:2: num_v_heads: '5', legal: a multiple of num_k_heads, 2");
  EXPECT_EQ(refusal("gdn_decode cpu q1 head_k_dim=40\n"),
            "s:2: head_k_dim: '40', legal: a multiple of 16, 16 ... 256");
  EXPECT_EQ(refusal("gdn_prefill cpu q8 method=fast\n"),
            "s:2: method: 'fast', legal: chunk, chunk_f32 or loop");
  EXPECT_EQ(test::error_text([&] { parse_shapes(kModel + "conv cpu q8\n", "s"); }),
            "s:2: num_k_heads: 'missing', legal: num_k_heads and num_v_heads of the model");
}

struct BadLine {
  const char* line;
  const char* says;
};

TEST(BenchShapes, BadLinesNameFileLineFieldAndWhatIsLegal) {
  const BadLine rows[] = {
      {"decoed cpu q1",
       "f:2: suite: 'decoed', legal: model, batch or decode, prefill, mixed, spec, cache"},
      {"decode cpu", "f:2: row: 'decode', legal: SUITE SETS BATCH"},
      {"decode cpu,tpu q1", "f:2: sets: 'tpu', legal: quick, cpu and gpu"},
      {"decode cpu, q1", "f:2: sets: '', legal"},
      {"decode cpu 1s5", "f:2: batch: '1s5', legal: [COUNT]qTOKENS"},
      {"decode cpu q0", "f:2: batch: 'q0'"},
      {"decode cpu q5s4", "f:2: batch: 'q5s4'"},
      {"decode cpu q1_", "f:2: batch: 'q1_'"},
      {"decode cpu q1x", "f:2: batch: 'q1x'"},
      {"decode cpu 99999q1", "f:2: batch: '99999q1'"},
      {"decode cpu 65536q16384", "f:2: batch: '65536q16384'"},
      {"decode cpu q99999999999999999999", "f:2: batch"},
      {"decode cpu q1 windw=4",
       "f:2: option: 'windw=4', legal: KEY=VALUE with KEY one of num_heads"},
      {"decode cpu q1 window", "f:2: option: 'window'"},
      {"decode cpu q1 sliding_window=-1", "f:2: sliding_window: '-1', legal: >= 0 (0 = none)"},
      {"decode cpu q1 num_heads=3", "f:2: num_heads: '3', legal: a multiple of num_kv_heads, 2"},
      {"decode cpu q1 use_mla=yes rope_dim=64",
       "f:2: rope_dim: '64', legal: less than head_size, 64"},
      {"decode cpu q1 logits_soft_cap=nan", "f:2: logits_soft_cap: 'nan', legal"},
      {"decode cpu q1 dtype=int8", "f:2: dtype: 'int8', legal: f32, f16 and bf16"},
      {"cache cpu q1 op=copy", "f:2: op: 'copy', legal: write, reshape_and_cache, append"},
      {"cache cpu q1 op=gather", "f:2: op: 'gather', legal: of latent attention"},
      {"cache cpu q1 op=reshape_and_cache use_mla=yes rope_dim=8",
       "f:2: op: 'reshape_and_cache', legal: not of latent attention"},
      {"cache cpu q1 op=swap_in", "f:2: batch: 'q1', legal: two pages or more"},
      {"decode cpu q1 op=append", "f:2: op: 'append', legal: in rows of suite cache"},
      {"cache cpu q1 layout=NDH", "f:2: layout: 'NDH', legal: NHD or HND"},
      {"decode cpu q1,q0", "f:2: batch: 'q0'"},
      {"decode cpu q1,", "f:2: batch: ''"},
      {"batch b", "f:2: batch: '', legal: batch NAME BATCH..."},
      {"batch b q1 q0", "f:2: batch: 'q0'"},
      {"batch b 65536q1\nbatch b q1", "f:3: batch: 'q1', legal: [COUNT]qTOKENS"},
      {"batch b 1024q16k q1", "f:2: batch: 'q1'"},
      {"batch b q1\ndecode cpu b\nbatch b q2",
       "f:4: batch: 'b', legal: all lines of a batch before its first row"},
      {"cache cpu q1 op=reshape_and_cache layout=HND",
       "f:2: layout: 'HND', legal: none with op reshape_and_cache"},
      {"decode cpu q1 sinks=1", "f:2: sinks: '1', legal: yes or no"},
      {"model", "f:2: model: '', legal: model NAME"},
      {"model x num_heads=4", "f:2: num_kv_heads: 'missing', legal"},
      {"decode cpu q1\ndecode gpu q1", "f:3: row: 'm/decode/q1', legal: each row once"},
  };
  for (const BadLine& row : rows) {
    try {
      parse_shapes(kModel + row.line, "f");
      ADD_FAILURE() << row.line << ": was taken";
    } catch (const clattn::Error& error) {
      EXPECT_EQ(error.code(), clattn::ErrorCode::kInvalidArgument);
      EXPECT_EQ(std::string(error.what()).find(row.says), 0U) << row.line << ": " << error.what();
    }
  }
  EXPECT_THROW(parse_shapes("decode cpu q1\n", "f"), clattn::Error) << "a row without a model";
}

/// Every file of bench/shapes/ can be read; each model has rows for CPUs, GPUs and --quick (the
/// upstream benchmarks: for GPUs), and llama-3-8b and qwen3.5-9b together have all suites.
TEST(BenchShapes, TheFilesOfTheRepositoryAreComplete) {
  std::set<std::string> names, suites;
  const auto files = shapes_files("");
  for (const auto& [file, text] : files) {
    const bool upstream = file.rfind("upstream", 0) == 0;
    const std::vector<BenchShape> shapes = parse_shapes(text, file);
    for (const char* set : {"quick", "cpu", "gpu"}) {
      const bool any = std::any_of(shapes.begin(), shapes.end(),
                                   [&](const BenchShape& shape) { return shape.in_set(set); });
      EXPECT_TRUE(any || (upstream && std::string(set) == "quick")) << file << ": " << set;
    }
    for (const BenchShape& shape : shapes) {
      EXPECT_TRUE(names.insert(shape.name()).second) << shape.name() << " is in two files";
      const bool by_default = shape.model.name == "llama-3-8b" || shape.model.name == "qwen3.5-9b";
      if (by_default && shape.in_set("quick")) suites.insert(shape.suite);
    }
  }
  EXPECT_GE(files.size(), 19U);
  const auto& all = clattn::cli::bench_suites();
  EXPECT_EQ(suites, std::set<std::string>(all.begin(), all.end()));
}

}  // namespace
