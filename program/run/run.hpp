#pragma once

#include <clattn/cache_ops.hpp>
#include <clattn/clattn.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "program/common/attention_call.hpp"
#include "program/run/case_file.hpp"

namespace clattn::cli {

/// What the command line adds to a case.
struct RunOptions {
  std::string device;   ///< selector; empty = the default device
  std::string backend;  ///< replaces the case's own when not empty
  bool verify = false;  ///< compare with the oracle
};

/// One operation of a case directory: reads parameters and arrays, checks all of it, runs, and adds
/// its outputs.
using Operation = void(CaseFile& file, const RunOptions& options, CaseOutputs& outputs);

Operation run_attention, run_mla_decode, run_reshape_and_cache, run_concat_and_cache_mla;
Operation run_copy_blocks, run_copy_blocks_mla, run_swap_blocks, run_gather, run_merge_attn_states;
Operation run_move_tokens, run_move_tokens_mla, run_calc_kv_scales;
Operation run_advance_step;  ///< by host loops where there is no device and none is named
Operation run_split_decodes_and_prefills, run_reorder_batch, run_paged_kv_metadata;
Operation run_compute_slot_mapping, run_local_virtual_batches;
Operation run_kv_cache_shape, run_select_backend;

// What several operations read.

/// Legal values of the shape fields: generous, but far from overflow.
inline constexpr Range kHeads{1, 65536};
inline constexpr Range kHeadSize{1, 65536};
inline constexpr Range kBlockSize{1, 1 << 24};

/// The element types of a case. A tensor's is the one of its array, where that is given.
DType read_dtype(CaseFile& file, const std::optional<std::string>& fallback = {});
DType read_dtype(CaseFile& file, const NpyArray& array, std::string_view name);
std::optional<DType> read_kv_cache_dtype(CaseFile& file);
/// k_scale and v_scale as KVCache::scales has them, [2][1 or num_kv_heads]; empty for caches that
/// are not quantized, where any factor but 1 throws kUnsupported.
std::vector<float> read_scales(CaseFile& file, DType cache_dtype, std::int32_t num_kv_heads);
/// One factor of a cache that is shared by all heads, 1 if not given; checked as those.
float read_scale(CaseFile& file, DType cache_dtype, const char* key = "k_scale");
/// The type that an array of a tensor or cache stands for; <u2 is bf16, |u1 fp8 e4m3.
DType dtype_of(const NpyArray& array, std::string_view file);
/// A parameter that repeats what the arrays say, if stated.
void require_extent(CaseFile& file, const char* key, Range range, std::int64_t extent);
/// Slots must fit the cache, and every slot that stores needs a row: of `num_tokens` the first.
std::vector<std::int64_t> read_slots(const CaseFile& file, std::int64_t num_tokens,
                                     std::int64_t num_slots);
/// Tokens to move, unchecked as pairs of blocks.
struct MovedSlots {
  std::vector<std::int64_t> src, dst;
  std::vector<std::int32_t> starts;
  TokenMoves view() const { return {src, dst, starts}; }
};
MovedSlots read_moves(const CaseFile& file);
/// Pairs of block ids, unchecked: the library call itself checks them.
std::vector<BlockPair> read_mapping(const CaseFile& file);
/// The element type of a cache: as stated in the case, else as its array's dtype implies.
DType read_cache_dtype(CaseFile& file, const NpyArray& array, std::string_view name);
/// Reads key_cache.npy and value_cache.npy of a layer's pages. -1 blocks allow any number, and
/// become that of the file.
LogicalCache read_caches(const CaseFile& file, const AttentionConfig& config,
                         std::int64_t& num_blocks);
void add_caches(CaseOutputs& outputs, const AttentionConfig& config, std::int64_t num_blocks,
                LogicalCache cache);
/// What ran where, for info.json.
nlohmann::json device_info(std::string_view op, const Context& context, const Event& event);
/// The same of attention, through a backend.
nlohmann::json attention_info(std::string_view op, const Context& context,
                              const AttentionOutcome& outcome);
/// Where `packed` is given, a case may also ask for an x-packed cache.
std::optional<KVCacheLayout> read_layout(CaseFile& file, bool* packed = nullptr);
/// Throws kUnsupported unless the backend of an x-packed case is left open.
void require_no_backend(const std::string& backend);
/// The keys that captures add for what decides the splits: split_policy, fast_build,
/// side_by_side and limits.
PlanOptions read_plan(CaseFile& file);
KernelFamily read_kernel_family(CaseFile& file);
std::string read_backend(CaseFile& file, const RunOptions& options);
/// The backend of a name, for what no configuration restricts; of "" and "auto" the selector's
/// choice for a common shape, which CLATTN_BACKEND forces. Throws as get_attn_backend().
const AttentionBackend& backend_named(const std::string& name);

BatchArrays read_batch(const CaseFile& file);
/// The same, which must have query_start_loc.
BatchArrays read_batch_with_queries(const CaseFile& file);

/// An array [num_reqs + 1] (num_reqs = -1: any number) of prefix sums: they start at 0 and never
/// fall.
std::vector<std::int32_t> read_prefix_sums(const CaseFile& file, std::string_view name,
                                           std::int64_t num_reqs);

/// Adds to info.json how far an outcome is from the oracle's (`oracle`), with what attention stored
/// in its cache.
void verify_outcome(const AttentionCall& call, const AttentionOutcome& outcome,
                    CaseOutputs& outputs);

/// Gives the call padding up to so many rows of the query; 0 = none. Throws if it has more rows.
void pad_to(std::int32_t num_rows, AttentionCall& call);
/// Reads the trees and first keys that the configuration takes and a case of attention or latent
/// attention has.
void read_seen_keys(const CaseFile& file, AttentionCall& call);

/// All of an attention case but its output options, checked.
AttentionCall read_attention_call(CaseFile& file, const RunOptions& options);

/// Compares outputs with what the captured call gave, the arrays of `directory`, bit for bit:
/// {"out": {"elements": 128, "different": 0}, …}. Outputs in single precision stand for the call's
/// own 16-bit ones. NaNs are equal. Throws kInvalidArgument for an array that the operation does
/// not give, or gives in another shape or type.
nlohmann::json compare_with_captured(const CaseOutputs& outputs,
                                     const std::filesystem::path& directory);

/// Writes a call as the case directory that `clattn run` reads as the same call, and what the
/// oracle says of it as expected/out.npy and expected/lse.npy, in single precision.
void write_case(const AttentionCall& call, const std::filesystem::path& directory);
/// The same of latent attention: mla_decode, with a request for each query token.
void write_latent_case(const AttentionCall& call, const std::filesystem::path& directory);

}  // namespace clattn::cli
