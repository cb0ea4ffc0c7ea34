#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>

#include "robustness/program.hpp"

namespace test_bench {

using nlohmann::json;

/// Whether the documented fields of a report are there and plausible.
void expect_report(const json& report) {
  EXPECT_EQ(report.at("format"), "clattn-bench");
  EXPECT_EQ(report.at("schema_version"), 1);
  for (const char* field : {"library_version", "commit", "date"}) {
    EXPECT_FALSE(report.at(field).get<std::string>().empty()) << field;
  }
  for (const char* field : {"name", "driver_version", "platform_version"}) {
    EXPECT_FALSE(report.at("device").at(field).get<std::string>().empty()) << field;
  }
  for (const char* field :
       {"read_gb_per_s", "page_read_gb_per_s", "copy_gb_per_s", "fma_gflop_per_s"}) {
    EXPECT_GT(report.at("ceilings").at(field).get<double>(), 0) << field;
  }
}

void expect_row(const json& row) {
  ASSERT_FALSE(row.contains("skipped")) << row;
  EXPECT_GT(row.at("median_us").get<double>(), 0);
  EXPECT_LE(row.at("p10_us").get<double>(), row.at("median_us").get<double>());
  EXPECT_GE(row.at("p90_us").get<double>(), row.at("median_us").get<double>());
  EXPECT_GT(row.at("verified_values").get<int>(), 0);
  EXPECT_TRUE(row.at("correct").get<bool>());
  EXPECT_GE(row.at("max_error").get<double>(), 0);
  EXPECT_LE(row.at("error_share_of_allowance").get<double>(), 1);
  EXPECT_FALSE(row.at("kernels").empty());
  EXPECT_EQ(row.at("options").at("head_size"), 64);
  EXPECT_EQ(row.contains("rate"), row.contains("ceiling"));
  const double spread = row.at("p90_us").get<double>() - row.at("p10_us").get<double>();
  EXPECT_EQ(row.at("unsteady").get<bool>(), spread > 0.2 * row.at("median_us").get<double>());
  const auto& kernel = row.at("kernels").at(0);
  EXPECT_EQ(kernel.contains("work_group_size"), kernel.at("role") != "host") << kernel;
  if (row.contains("rate")) {
    EXPECT_GT(row.at("bytes").get<double>(), 0);
    EXPECT_GT(row.at("rate").get<double>(), 0);
    EXPECT_TRUE(row.at("resident").get<bool>()) << "--quick walks over little memory";
    const std::string suite = row.at("suite");
    const bool moves = suite == "cache" || suite == "merge" || suite == "conv";
    const bool either = suite.starts_with("gdn_");
    EXPECT_TRUE(either || (row.at("ceiling") == "copy") == moves) << row;
    EXPECT_FALSE(row.at("rate_unit") == "GB/s" && row.contains("share_of_ceiling"));
  }
}

/// Every suite once on a small model, as JSON; then two such reports as a page.
TEST(Bench, EverySuiteReportsWhatTheDocumentsSay) {
  const ScratchDirectory scratch;
  const std::string shapes = (scratch.path() / "tiny.txt").string();
  const std::string first = (scratch.path() / "first.json").string();
  const std::string second = (scratch.path() / "second.json").string();
  const std::string page = (scratch.path() / "page.html").string();
  write_bytes(
      shapes,
      "model tiny num_heads=4 num_kv_heads=2 head_size=64 dtype=f32 num_k_heads=2 "
      "num_v_heads=4 head_k_dim=32 head_v_dim=48\n"
      "decode quick 2q1s100\nprefill quick q70\nmixed quick q20s50_2q1s33\n"
      "spec quick 2q3s40\ncache quick q40\nmerge quick q40\nmetadata quick 3q1s100\n"
      "startup quick q1s20\nfirst_step quick q1s20\nwarmed_step quick q1s20\nstep quick "
      "2q1s20\nreplay quick 2q1s20\nlengths quick 2q1s20\n"
      "mixed_replay quick q20s50_2q1s33\ngdn_decode quick 3q1s9,17q1\ngdn_prefill quick "
      "q40,3q30s50_q5\ngdn_prefill quick q40 method=loop\n"
      "gdn_prefill quick q40s60 dtype=bf16 state_dtype=f16\nconv quick 3q1s9,q40,q2s9_q3\n");
  const ProgramResult result =
      run_program("bench all --quick --filter tiny/ --shapes " + shapes + " --json " + first);
  ASSERT_EQ(result.code, 0) << result.standard_output << result.standard_error;
  const std::string text = read_bytes(first);
  const json report = json::parse(text);
  expect_report(report);
  EXPECT_EQ(std::ranges::count(text, '\n'),  // a line each, and three of brackets
            std::ssize(report) + std::ssize(report.at("rows")) + 3);
  std::set<std::string> suites;
  for (const json& row : report.at("rows")) {
    SCOPED_TRACE(row.at("name").get<std::string>());
    expect_row(row);
    suites.insert(row.at("suite").get<std::string>());
  }
  EXPECT_EQ(suites.size(), 17U);

  std::filesystem::copy_file(first, second);
  const ProgramResult compared =
      run_program("bench --compare " + first + " " + second + " --html " + page);
  EXPECT_EQ(compared.code, 0) << compared.standard_error;
  EXPECT_NE(compared.standard_output.find("1.000x"), std::string::npos);
  const std::string html = read_bytes(page);
  for (const char* part : {"<svg", "Roofline", "tiny/decode/2q1s100", "second", "</html>"}) {
    EXPECT_NE(html.find(part), std::string::npos) << part;
  }
}

/// How each step was cut, and for how long, beside what was measured.
TEST(Bench, PlansStandBesideWhatTheyTake) {
  const ScratchDirectory scratch;
  const std::string file = (scratch.path() / "plans.json").string();
  const std::string arguments = "bench decode mixed --quick --model plans --plan";
  const ProgramResult printed = run_program(arguments);
  ASSERT_EQ(printed.code, 0) << printed.standard_output << printed.standard_error;
  for (const char* part : {"tasks of", "predicted", "all in a queue", "of 2 rows are predicted"}) {
    EXPECT_NE(printed.standard_output.find(part), std::string::npos) << part;
  }
  ASSERT_EQ(run_program(arguments + " --json " + file).code, 0);
  for (const json& row : json::parse(read_bytes(file)).at("rows")) {
    double sum = 0;
    EXPECT_GE(row.at("plan").size(), row.at("suite") == "mixed" ? 2U : 1U) << row;
    for (const json& launch : row.at("plan")) {
      EXPECT_FALSE(launch.at("kernel").get<std::string>().empty());
      EXPECT_GE(launch.at("tasks"), launch.at("items"));
      EXPECT_GE(launch.at("splits"), launch.at("split_tiles"));
      EXPECT_GT(launch.at("measured_us").get<double>(), 0);
      sum += launch.at("predicted_us").get<double>();
    }
    EXPECT_NEAR(row.at("predicted_us").get<double>(), sum, 1e-6 * sum);
  }
}

/// Who is ended while it writes leaves the report before: it is written beside it, then renamed.
TEST(Bench, AReportIsReplacedAndNotWrittenOver) {
  const ScratchDirectory scratch;
  const std::filesystem::path file = scratch.path() / "report.json", old = scratch.path() / "old";
  write_bytes(file, "before");
  std::filesystem::create_hard_link(file, old);
  write_bytes(scratch.path() / "shapes.txt",
              "model tiny num_heads=2 num_kv_heads=1 head_size=64\nmetadata quick 3q1s100\n");
  const ProgramResult result = run_program("bench --quick --json " + file.string() + " --shapes " +
                                           (scratch.path() / "shapes.txt").string());
  ASSERT_EQ(result.code, 0) << result.standard_error;
  EXPECT_EQ(read_bytes(old), "before");
  EXPECT_EQ(json::parse(read_bytes(file)).at("rows").size(), 1U);
  EXPECT_FALSE(std::filesystem::exists(file.string() + ".tmp"));
}

/// Latent rows, windows, a soft cap, sinks, an 8-bit cache and one with a scale for each token and
/// head are judged right.
TEST(Bench, TheOptionsOfModelsAreMeasuredAndRight) {
  const ScratchDirectory scratch;
  const std::string shapes = (scratch.path() / "options.txt").string();
  write_bytes(shapes,
              "model latent num_heads=16 num_kv_heads=1 head_size=80 use_mla=yes rope_dim=16 "
              "dtype=f32 scale=0.2\n"
              "decode quick 2q1s40\ncache quick q40\n"
              "model gemma num_heads=2 num_kv_heads=1 head_size=64 dtype=f16 sliding_window=30 "
              "logits_soft_cap=20 sinks=yes\n"
              "decode quick 2q1s70\nprefill quick q70 kv_cache_dtype=fp8_e4m3\n"
              "mixed quick q20_2q1s70 kv_cache_dtype=int8_per_token_head\n"
              "decode quick 2q1s70 kv_cache_dtype=uint4_per_token_head\n");
  const ProgramResult result = run_program("bench --quick --json - --shapes " + shapes);
  EXPECT_EQ(result.code, 0) << result.standard_error;
  const json report = json::parse(result.standard_output);
  EXPECT_EQ(report.at("rows").size(), 6U);
  for (const json& row : report.at("rows")) {
    EXPECT_TRUE(row.value("correct", false)) << row;
  }
}

/// Every cache operation, in every layout that it has, is measured and bit for bit right.
// What rows see more is counted as work, and compared with the oracle.
TEST(Bench, SpansAndDirectionsAreMeasuredAndRight) {
  const ScratchDirectory scratch;
  const std::string shapes = (scratch.path() / "lists.txt").string();
  write_bytes(shapes,
              "model lists num_heads=4 num_kv_heads=2 head_size=64 dtype=f32\n"
              "prefill quick q40s60\nprefill quick q40s60 span=30\n"
              "prefill quick q40s60 directions=yes\n"
              "mixed quick 2q1s50_2q30s60 span=20 directions=yes window_left=24 window_right=4 "
              "span_rule=clip_both sinks=yes alibi_slopes=yes\n");
  const ProgramResult result = run_program("bench --quick --json - --shapes " + shapes);
  ASSERT_EQ(result.code, 0) << result.standard_output << result.standard_error;
  const json rows = json::parse(result.standard_output).at("rows");
  ASSERT_EQ(rows.size(), 4U);
  for (const json& row : rows) expect_row(row);
  // Rows of 2 * (64 + 64) operations for each of 4 heads: 40 see 21 to 60 keys; the 30 of the span,
  // from position 25 on, see it up to 55; all see all 60.
  const double pair = 2 * 128 * 4, causal = 40 * (21 + 60) / 2;
  EXPECT_EQ(rows.at(0).at("flops"), pair * causal);
  EXPECT_EQ(rows.at(1).at("flops"), pair * (causal + 30 * 29 / 2));
  EXPECT_EQ(rows.at(2).at("flops"), pair * 40 * 60);
}

TEST(Bench, TreesAreMeasuredAndRight) {
  const ScratchDirectory scratch;
  const std::string shapes = (scratch.path() / "trees.txt").string();
  write_bytes(shapes,
              "model trees num_heads=4 num_kv_heads=2 head_size=64 dtype=f32\n"
              "spec quick 2q7s60 tree=2\nspec quick 2q7s60 masked_tree=2 sinks=yes\n"
              "spec quick 2q7s60 tree=1\nspec quick 2q7s60\n");
  const ProgramResult result = run_program("bench --quick --json - --shapes " + shapes);
  ASSERT_EQ(result.code, 0) << result.standard_output << result.standard_error;
  const json rows = json::parse(result.standard_output).at("rows");
  ASSERT_EQ(rows.size(), 4U);
  for (const json& row : rows) expect_row(row);
  // 53 keys of context, and 1, 2 or 3 drafts of a path.
  const double pair = 2 * 128 * 4, context = 7 * 53;
  EXPECT_EQ(rows.at(0).at("flops"), 2 * pair * (context + 1 + 2 * 2 + 4 * 3));
  EXPECT_EQ(rows.at(1).at("flops"), rows.at(0).at("flops"));
  EXPECT_EQ(rows.at(2).at("flops"), rows.at(3).at("flops"));
}

TEST(Bench, EveryCacheOperationIsMeasuredAndRight) {
  const ScratchDirectory scratch;
  const std::string shapes = (scratch.path() / "cache.txt").string();
  write_bytes(
      shapes,
      "model plain num_heads=4 num_kv_heads=2 head_size=64 dtype=f16\n"
      "cache quick q40 layout=NHD\ncache quick q40_3q1s50 layout=HND\n"
      "cache quick 2q20s37 op=reshape_and_cache\ncache quick q5s40_3q1s17 op=append\n"
      "cache quick q20 op=append layout=HND kv_cache_dtype=fp8_e4m3\n"
      "cache quick q100 op=copy_blocks\ncache quick 3q30 op=copy_blocks layout=HND\n"
      "cache quick q100 op=swap_out layout=NHD\ncache quick q100 op=swap_out layout=HND\n"
      "cache quick 5q1s20 op=swap_in\ncache quick q100 op=swap_in layout=HND\n"
      "model latent num_heads=16 num_kv_heads=1 head_size=80 use_mla=yes rope_dim=16 dtype=f16\n"
      "cache quick q40\ncache quick q100 op=copy_blocks\ncache quick q100 op=swap_out\n"
      "cache quick q100 op=swap_in\ncache quick 2q1s50_q1s5 op=gather\n"
      "cache quick q60 op=gather kv_cache_dtype=fp8_e4m3\n");
  const ProgramResult result = run_program("bench --quick --json - --shapes " + shapes);
  ASSERT_EQ(result.code, 0) << result.standard_output << result.standard_error;
  const json report = json::parse(result.standard_output);
  ASSERT_EQ(report.at("rows").size(), 17U);
  std::set<std::string> operations;
  for (const json& row : report.at("rows")) {
    ASSERT_FALSE(row.contains("skipped")) << row;
    EXPECT_TRUE(row.at("correct").get<bool>()) << row;
    EXPECT_EQ(row.at("ceiling"), "copy");
    operations.insert(row.at("kernels").at(0).at("name").get<std::string>());
  }
  // Three pages, K and V; rows; tokens and their slots: once in and once out.
  EXPECT_EQ(report.at("rows")[5].at("bytes"), 2 * 3 * 2 * 16 * 2 * 64 * 2);
  EXPECT_EQ(report.at("rows")[15].at("bytes"), 2 * (50 + 50 + 5) * 80 * 2);
  EXPECT_EQ(report.at("rows")[0].at("bytes"), 40 * (2 * 2 * 2 * 64 * 2 + 8));
  EXPECT_EQ(operations, (std::set<std::string>{
                            "reshape_and_cache_flash", "reshape_and_cache", "append_paged_kv_cache",
                            "copy_blocks", "swap_blocks", "concat_and_cache_mla", "copy_blocks_mla",
                            "gather_and_maybe_dequant_cache"}));
}

/// Their results are narrower than their queries.
TEST(Bench, StepsOfLatentModelsAreMeasuredAndRight) {
  const ScratchDirectory scratch;
  const std::string shapes = (scratch.path() / "latent.txt").string();
  write_bytes(
      shapes,
      "model latent num_heads=16 num_kv_heads=1 head_size=80 use_mla=yes rope_dim=16 dtype=f16\n"
      "step quick 2q1s20\nreplay quick 2q1s20\nlengths quick 2q1s20\n");
  const ProgramResult result = run_program("bench --quick --json - --shapes " + shapes);
  ASSERT_EQ(result.code, 0) << result.standard_output << result.standard_error;
  const json report = json::parse(result.standard_output);
  ASSERT_EQ(report.at("rows").size(), 3U);
  for (const json& row : report.at("rows")) {
    ASSERT_FALSE(row.contains("skipped")) << row;
    EXPECT_TRUE(row.at("correct").get<bool>()) << row;
  }
}

/// Several backends in one run, so that a peer stands beside; launches of one kernel in one entry.
TEST(Bench, BackendsStandSideBySide) {
  const ScratchDirectory scratch;
  const std::string shapes = (scratch.path() / "tiny.txt").string();
  write_bytes(shapes,
              "model tiny num_heads=4 num_kv_heads=2 head_size=64 dtype=f16\ndecode quick 40q1s20\n"
              "decode quick 40q1s20 kernel_family=gpu\n");
  const ProgramResult result =
      run_program("bench --quick --backend FLASHINFER,XFORMERS --json - --shapes " + shapes);
  ASSERT_EQ(result.code, 0) << result.standard_error;
  const json report = json::parse(result.standard_output);
  const json& rows = report.at("rows");
  ASSERT_EQ(rows.size(), 4U);
  const char* const names[] = {"tiny/decode/40q1s20/FLASHINFER", "tiny/decode/40q1s20/XFORMERS",
                               "tiny/decode/40q1s20/kernel_family=gpu/FLASHINFER",
                               "tiny/decode/40q1s20/kernel_family=gpu/XFORMERS"};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i].at("name"), names[i]);
    EXPECT_EQ(rows[i].at("backend"), i % 2 == 0 ? "FLASHINFER" : "XFORMERS");
    // 16 requests of 2 query heads and 64 dims each.
    EXPECT_EQ(rows[i].at("verified_values"), 16 * 2 * 64) << names[i];
    std::set<std::string> kernels;
    for (const json& kernel : rows[i].at("kernels")) {
      EXPECT_GE(kernel.at("launches"), 1);
      EXPECT_TRUE(kernels.insert(kernel.at("name")).second) << kernel;
    }
  }
  const json& own = rows[0].at("kernels").at(0);
  const json& portable = rows[2].at("kernels").at(0);
  EXPECT_EQ(portable.at("name").get<std::string>().rfind("decode_gpu__", 0), 0U) << portable;
  EXPECT_NE(own.at("name"), portable.at("name"));
}

TEST(Bench, RefusesWithOneLine) {
  expect_refusal(run_program("bench --predict no-such-card"), 2,
                 "--predict: 'no-such-card', legal: mi100, ");
  expect_refusal(run_program("bench decode --predict mi300x --json -"), 2, "--json: ");
  expect_refusal(run_program("bench --quick --model no-such-model"), 2,
                 "--model: 'no-such-model' is unknown; one of all, aims, deepseek-v3");
  expect_refusal(
      run_program("bench --quick --filter no-such-row"), 2,
      "no row of set quick is of models llama-3-8b, qwen3.5-9b, with 'no-such-row' in its name");
  expect_refusal(
      run_program("bench spec --quick --filter no-such-row"), 2,
      "of models llama-3-8b, qwen3.5-9b, of suites spec, with 'no-such-row' in its name");
  expect_refusal(run_program("bench --quick --backend FLASHINFER,FLASHINFER"), 2, "each once");
  // Before anything is measured: no header with ceilings.
  for (const char* arguments : {"--backend NOPE", "--json /nonexistent/x.json", "--json /"}) {
    const ProgramResult result = run_program(std::string("bench --quick ") + arguments);
    expect_refusal(result, 2,
                   std::string_view(arguments).substr(std::string_view(arguments).find(' ') + 1));
    EXPECT_EQ(result.standard_output, "") << arguments;
  }
  expect_refusal(run_program("bench --compare a.json --html /nonexistent/x.html"), 2,
                 "/nonexistent/x.html");
  expect_refusal(run_program("bench --compare /no/such.json"), 2, "/no/such.json");
  expect_refusal(run_program("bench --quick --html x.html"), 2, "--compare");
  const ScratchDirectory scratch;
  write_bytes(scratch.path() / "two.txt",
              "model a num_heads=2 num_kv_heads=1 head_size=64\ndecode gpu q1,q2\ncache gpu q4\n"
              "model b num_heads=2 num_kv_heads=1 head_size=64\ndecode gpu q1,q2\n");
  expect_refusal(run_program("bench --quick --shapes " + (scratch.path() / "two.txt").string()), 2,
                 "no row of set quick is of models a, b\n");
  write_bytes(scratch.path() / "bad.txt", "decode quick q1\n");
  expect_refusal(run_program("bench --quick --shapes " + (scratch.path() / "bad.txt").string()), 2,
                 "bad.txt:1: suite: 'decode', legal: a model line before the first row");
}

TEST(Bench, SaysWhyNoRowFits) {
  const ScratchDirectory scratch;
  write_bytes(
      scratch.path() / "huge.txt",
      "model huge num_heads=8 num_kv_heads=8 head_size=128\ncache quick 65536q1s16777216\n");
  expect_refusal(
      run_program("bench --quick --json - --shapes " + (scratch.path() / "huge.txt").string()), 3,
      "no row fits this device: needs ");
}

/// A card that no machine of these tests has: predictions, and the rows that they were made from.
TEST(Bench, PredictsForACardThatIsNotThere) {
  const ProgramResult result = run_program("bench decode prefill --predict mi300x");
  ASSERT_EQ(result.code, 0) << result.standard_error;
  const std::string& text = result.standard_output;
  EXPECT_TRUE(text.starts_with("PREDICTED, not measured: AMD Instinct MI300X")) << text;
  for (const char* part : {"llama-3-8b/decode/64q1s8k ", "llama-3-8b/prefill/4q4k ",
                           "prefill_mfma__r128_kv32", "\ncost gfx942* * decode_mfma__r16 "}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is missing in\n" << text;
  }
  EXPECT_EQ(text.find("MEASURED"), std::string::npos);
}

/// A layer that no kernel takes has its reason, and the rows behind it have their predictions.
TEST(Bench, PredictionsGoOnBehindALayerWithoutAKernel) {
  const ScratchDirectory scratch;
  write_bytes(scratch.path() / "wide.txt",
              "model wide num_heads=8 num_kv_heads=1 head_size=520\ndecode gpu q1s70\n"
              "decode gpu q1s70 head_size=64\n");
  const ProgramResult result =
      run_program("bench --predict mi300x --shapes " + (scratch.path() / "wide.txt").string());
  ASSERT_EQ(result.code, 0) << result.standard_error;
  const std::string& text = result.standard_output;
  EXPECT_NE(text.find("not predicted: head_size 520 not supported: 8 … 512"), std::string::npos)
      << text;
  EXPECT_NE(text.find("decode_mfma__r16\n"), std::string::npos) << text;
}

}  // namespace test_bench
