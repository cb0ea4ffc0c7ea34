#include "program/run/run.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <clattn/registry.hpp>
#include <cmath>
#include <filesystem>
#include <memory>
#include <span>

#include "program/commands.hpp"
#include "program/common/elements.hpp"
#include "program/common/error.hpp"
#include "program/common/options.hpp"
#include "program/common/text.hpp"

namespace clattn::cli {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(LaunchReport, name, role, tasks, work_groups, work_group_size,
                                   time_us)

namespace {

struct OperationRow {
  std::string_view name;
  Operation* run;
  bool has_oracle = false;  ///< takes RunOptions::verify
};
constexpr std::array<OperationRow, 20> kOperations = {{
    {"attention", run_attention, true},
    {"reshape_and_cache", run_reshape_and_cache},
    {"split_decodes_and_prefills", run_split_decodes_and_prefills},
    {"reorder_batch_to_split_decodes_and_prefills", run_reorder_batch},
    {"paged_kv_metadata", run_paged_kv_metadata},
    {"compute_slot_mapping", run_compute_slot_mapping},
    {"kv_cache_shape", run_kv_cache_shape},
    {"select_backend", run_select_backend},
    {"copy_blocks", run_copy_blocks},
    {"swap_blocks", run_swap_blocks},
    {"move_tokens", run_move_tokens},
    {"move_tokens_mla", run_move_tokens_mla},
    {"merge_attn_states", run_merge_attn_states},
    {"concat_and_cache_mla", run_concat_and_cache_mla},
    {"mla_decode", run_mla_decode, true},
    {"copy_blocks_mla", run_copy_blocks_mla},
    {"gather_and_maybe_dequant_cache", run_gather},
    {"calc_kv_scales", run_calc_kv_scales},
    {"make_local_attention_virtual_batches", run_local_virtual_batches},
    {"advance_step", run_advance_step},
}};

/// Factors of a scale: one, or one a head, each > 0 as f32; of caches that are not quantized 1.
std::vector<double> read_factors(CaseFile& file, const char* key, DType cache_dtype,
                                 std::int32_t num_heads) {
  std::vector<double> factors = file.numbers(key, num_heads, 1.0);
  for (const double factor : factors) {
    throw_invalid_if(!(static_cast<float>(factor) > 0),
                     "case.json: {}: expected numbers > 0, got {}", key, factor);
    if (factor != 1 && !is_quantized(cache_dtype)) {
      throw_unsupported(
          "case.json: {}: {} is not supported with a cache of {}; expected 1 "
          "unless kv_cache_dtype is fp8_e4m3, fp8_e5m2 or int8",
          key, factor, to_string(cache_dtype));
    }
  }
  return factors;
}

/// Outputs may have inputs' names: in the case's own folder, however it is spelt, they would
/// replace them.
void refuse_own_folder(const std::filesystem::path& directory, const std::filesystem::path& out) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (!fs::equivalent(directory, fs::weakly_canonical(out, ignored), ignored)) return;
  throw_invalid("--out: {} is the case's own folder; expected another", out.string());
}

/// Names the cases where a folder of them, such as CLATTN_CAPTURE_DIR, was given for one.
void refuse_folder_of_cases(const std::filesystem::path& directory) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (fs::exists(directory / "case.json", ignored)) return;
  constexpr std::size_t kMostNamed = 8;
  std::vector<std::string> cases;
  for (fs::directory_iterator at(directory, ignored), end; at != end; at.increment(ignored)) {
    if (fs::exists(at->path() / "case.json", ignored))
      cases.push_back(at->path().filename().string());
  }
  if (cases.empty()) return;  // the missing case.json is named by whoever reads it
  std::ranges::sort(cases);
  const std::span shown = std::span(cases).first(std::min(cases.size(), kMostNamed));
  throw_invalid("{}: holds {} cases, expected one of them: {}{}", directory.string(), cases.size(),
                fmt::join(shown, ", "), cases.size() > kMostNamed ? " ..." : "");
}

/// Prints how far the outputs are from the oracle's, and ends the program with 1 if that is too
/// far.
void say_verdict(const nlohmann::json& verdict) {
  const bool passed = verdict["passed"];
  const double error = verdict["max_error"];
  fmt::print(
      "{}: {} elements ({}) compared with the oracle, largest error {}, {:.3g} allowed there\n",
      passed ? "passed" : "FAILED", verdict["elements"].dump(),
      verdict["compared"].get<std::string>(),
      std::isfinite(error) ? fmt::format("{:.3g}", error) : "infinite",
      verdict["allowed"].get<double>());
  if (!passed) throw ExitCode{Status::kFailed};
}

void run_case(const std::filesystem::path& directory, std::filesystem::path out,
              const RunOptions& options) {
  namespace fs = std::filesystem;
  if (out.empty()) out = directory / "out";
  refuse_own_folder(directory, out);
  refuse_folder_of_cases(directory);
  CaseFile file(directory);
  const std::string op =
      file.choice("op", names_of<std::string_view>(kOperations, &OperationRow::name), {});
  const auto* const row = std::ranges::find(kOperations, op, &OperationRow::name);
  if (options.verify && !row->has_oracle)
    throw_unsupported("--verify for op {}: not supported, legal: attention, mla_decode", op);
  CaseOutputs outputs;
  row->run(file, options, outputs);
  file.refuse_unknown_arrays();  // which arrays it has, options decide up to the end
  nlohmann::json compared = nlohmann::json::object();
  if (const fs::path captured = directory / "captured"; fs::is_directory(captured)) {
    compared = compare_with_captured(outputs, captured);
    outputs.add_info("captured", compared);
  }
  outputs.write(out);
  for (const auto& [name, result] : compared.items()) {
    fmt::print("{}: {} of {} elements differ from what the captured call gave\n", name,
               result["different"].get<std::int64_t>(), result["elements"].get<std::int64_t>());
  }
  if (options.verify) say_verdict(outputs.info("oracle"));
}

}  // namespace

void verify_outcome(const AttentionCall& call, const AttentionOutcome& outcome,
                    CaseOutputs& outputs) {
  Deviation deviation = judge_output(call, outcome, oracle_result(call));
  const bool stored = !outcome.cache.key.empty();
  if (stored) deviation.merge(judge_cache(call, outcome, expected_cache(call)));
  outputs.add_info("oracle", {{"passed", deviation.passed() || call.num_tokens() == 0},
                              {"compared", stored ? "output, LSE and cache" : "output and LSE"},
                              {"elements", deviation.compared},
                              {"max_error", deviation.max_error},
                              {"allowed", deviation.allowance},
                              {"worst_share", deviation.worst_share}});
}

DType read_dtype(CaseFile& file, const std::optional<std::string>& fallback) {
  constexpr std::array<std::string_view, 3> kTypes = {"f32", "f16", "bf16"};
  return parse_dtype(file.choice("dtype", kTypes, fallback, dtype_name));
}

DType read_dtype(CaseFile& file, const NpyArray& array, std::string_view name) {
  return read_dtype(file, std::string(to_string(dtype_of(array, name))));
}

std::optional<DType> read_kv_cache_dtype(CaseFile& file) {
  const auto format =
      parse_kv_cache_dtype(file.choice("kv_cache_dtype", kCacheTypeNames, "auto", dtype_name));
  return format ? std::optional(format->k.code) : std::nullopt;  // the names are those of types
}

std::vector<float> read_scales(CaseFile& file, DType cache_dtype, std::int32_t num_kv_heads) {
  const std::array<std::vector<double>, 2> factors = {
      read_factors(file, "k_scale", cache_dtype, num_kv_heads),
      read_factors(file, "v_scale", cache_dtype, num_kv_heads)};
  const bool per_head = factors[0].size() > 1 || factors[1].size() > 1;
  std::vector<float> scales;
  if (!is_quantized(cache_dtype)) return scales;
  for (const std::vector<double>& each : factors) {
    const std::size_t copies = per_head && each.size() == 1 ? to_size(num_kv_heads) : 1;
    for (std::size_t copy = 0; copy < copies; ++copy) {
      for (const double factor : each) scales.push_back(static_cast<float>(factor));
    }
  }
  return scales;
}

float read_scale(CaseFile& file, DType cache_dtype, const char* key) {
  return static_cast<float>(read_factors(file, key, cache_dtype, 1).front());
}

std::optional<KVCacheLayout> read_layout(CaseFile& file, bool* packed) {
  constexpr std::array<std::string_view, 3> kLayouts = {"NHD", "HND", "packed"};
  if (!file.has("layout")) return std::nullopt;
  const std::string name =
      file.choice("layout", std::span(kLayouts).first(packed != nullptr ? 3 : 2), "");
  if (packed == nullptr || name != "packed") return parse_kv_cache_layout(name);
  *packed = true;
  return std::nullopt;
}

void require_no_backend(const std::string& backend) {
  if (backend.empty() || backend == "auto") return;
  throw_unsupported(
      "layout: packed is paged_attention's, not backend {}'s; expected backend "
      "auto, or layout NHD or HND",
      backend);
}

PlanOptions read_plan(CaseFile& file) {
  constexpr std::array<std::string_view, 2> kPolicies = {"balanced", "deterministic"};
  PlanOptions plan;
  if (file.choice("split_policy", kPolicies, "balanced") == "deterministic") {
    plan.split_policy = SplitPolicy::kDeterministic;
  }
  plan.fast_build = file.boolean("fast_build", false);
  plan.side_by_side = file.boolean("side_by_side", true);
  bool any = false;
  for (const auto& [key, limit] : kLimitKeys) any = file.has(key) || any;
  if (!any) return plan;
  plan.limits.emplace();
  for (const auto& [key, limit] : kLimitKeys) {
    // What a step within them cannot have, the builder refuses, here as in captures.
    (*plan.limits).*limit = file.int32(key, {1, INT32_MAX});
  }
  return plan;
}

KernelFamily read_kernel_family(CaseFile& file) {
  const auto names = names_of<std::string_view>(
      kKernelFamilies, [](KernelFamily family) { return to_string(family); });
  return parse_kernel_family(file.choice("kernel_family", names, "auto"));
}

nlohmann::json attention_info(std::string_view op, const Context& context,
                              const AttentionOutcome& outcome) {
  return {{"op", op},
          {"device", context.capabilities().name},
          {"driver", context.capabilities().driver_version},
          {"backend", outcome.backend},
          {"kernels", outcome.launches},
          {"build_failures", context.build_failures()}};
}

std::string read_backend(CaseFile& file, const RunOptions& options) {
  const std::string named = file.text("backend", "");
  return options.backend.empty() ? named : options.backend;
}

const AttentionBackend& backend_named(const std::string& name) {
  if (!name.empty() && name != "auto") return *find_attn_backend(name);
  return *get_attn_backend({.num_heads = 1, .num_kv_heads = 1, .head_size = 64, .block_size = 16},
                           nullptr, name);
}

std::vector<std::int32_t> read_prefix_sums(const CaseFile& file, std::string_view name,
                                           std::int64_t num_reqs) {
  const Extents shape = {num_reqs < 0 ? -1 : num_reqs + 1};
  std::vector<std::int32_t> starts = file.indices32(name, shape);
  for (std::size_t r = 0; r < std::max<std::size_t>(starts.size(), 1); ++r) {
    const bool right = !starts.empty() && (r == 0 ? starts[0] == 0 : starts[r] >= starts[r - 1]);
    if (right) continue;
    throw_invalid("{}.npy: entry {} is {}; expected prefix sums that start at 0 and never fall",
                  name, r, starts.empty() ? "missing" : std::to_string(starts[r]));
  }
  return starts;
}

BatchArrays read_batch(const CaseFile& file) {
  BatchArrays arrays;
  std::vector<std::int64_t> shape;
  arrays.seq_lens = file.indices32("seq_lens", {-1}, &shape);
  const std::int64_t num_reqs = shape[0];
  arrays.block_table = file.indices32("block_table", {num_reqs, -1}, &shape);
  arrays.max_blocks = shape[1];
  if (file.has_array("query_start_loc")) {
    arrays.query_start_loc = read_prefix_sums(file, "query_start_loc", num_reqs);
  }
  return arrays;
}

BatchArrays read_batch_with_queries(const CaseFile& file) {
  BatchArrays batch = read_batch(file);
  throw_invalid_if(batch.query_start_loc.empty(),
                   "query_start_loc.npy: missing; expected {} prefix sums",
                   batch.seq_lens.size() + 1);
  return batch;
}

void add_run_command(CLI::App& app) {
  struct Arguments {
    std::string directory, out;
    RunOptions options;
  };
  auto* command = app.add_subcommand("run", "Execute a case directory and write its outputs");
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("case_dir", arguments->directory, "Directory with case.json and arrays")
      ->required();
  command->add_option("--out", arguments->out, "Directory of the outputs (default CASE_DIR/out)");
  add_device(*command, arguments->options.device);
  command->add_option("--backend", arguments->options.backend, "Force a backend by name");
  command->add_flag("--verify", arguments->options.verify,
                    "Compare the outputs with the oracle; exit code 1 where they are wrong");
  command->callback(
      [arguments] { run_case(arguments->directory, arguments->out, arguments->options); });
}

}  // namespace clattn::cli
