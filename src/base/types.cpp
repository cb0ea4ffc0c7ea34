#include <clattn/types.hpp>

#include <span>

#include "base/names.hpp"

namespace clattn {
namespace {

using detail::find_named, detail::Named, detail::names_of, detail::parse_named, detail::row_of;

struct DTypeRow {
  DType value;
  std::string_view name;
  std::size_t size_bytes;
};
constexpr DTypeRow kDTypes[] = {{DType::kF32, "f32", 4},          {DType::kF16, "f16", 2},
                                {DType::kBF16, "bf16", 2},        {DType::kFp8E4M3, "fp8_e4m3", 1},
                                {DType::kFp8E5M2, "fp8_e5m2", 1}, {DType::kInt8, "int8", 1},
                                {DType::kUInt4x2, "uint4x2", 1}};

/// All but the last, of which a cache is no format without scales in its pages.
constexpr std::span kWholeTypes = std::span(kDTypes).first<std::size(kDTypes) - 1>();

/// Other spellings of these names.
constexpr Named<DType> kDTypeSpellings[] = {
    {DType::kF32, "float32"}, {DType::kF32, "float"},          {DType::kF16, "float16"},
    {DType::kF16, "half"},    {DType::kBF16, "bfloat16"},      {DType::kFp8E4M3, "float8_e4m3fn"},
    {DType::kFp8E4M3, "fp8"}, {DType::kFp8E5M2, "float8_e5m2"}};
constexpr Named<AttentionType> kAttentionTypes[] = {
    {AttentionType::kDecoder, "decoder"},
    {AttentionType::kEncoder, "encoder"},
    {AttentionType::kEncoderOnly, "encoder_only"},
    {AttentionType::kEncoderDecoder, "encoder_decoder"}};
constexpr Named<SpanRule> kSpanRules[] = {{SpanRule::kWhole, "whole"},
                                          {SpanRule::kClipLeft, "clip_left"},
                                          {SpanRule::kClipBoth, "clip_both"}};
constexpr Named<KVCacheLayout> kLayouts[] = {{KVCacheLayout::kNHD, "NHD"},
                                             {KVCacheLayout::kHND, "HND"}};
constexpr Named<KVCacheLayout> kLayoutSpellings[] = {{KVCacheLayout::kNHD, "LBNHC"},
                                                     {KVCacheLayout::kHND, "LBHNC"}};
constexpr Named<KVCacheKind> kKinds[] = {
    {KVCacheKind::kFull, "full"},
    {KVCacheKind::kSlidingWindow, "sliding_window"},
    {KVCacheKind::kChunkedLocal, "chunked_local"},
    {KVCacheKind::kEncoderOnly, "encoder_only"},
    {KVCacheKind::kCross, "cross"},
    {KVCacheKind::kMamba, "mamba"},
};
constexpr Named<KVCacheKind> kKindSpellings[] = {
    {KVCacheKind::kFull, "full_attention"},
    {KVCacheKind::kChunkedLocal, "chunked_local_attention"},
    {KVCacheKind::kEncoderOnly, "encoder_only_attention"},
    {KVCacheKind::kCross, "cross_attention"},
};

/// Formats that are no element types.
constexpr Named<CacheFormat> kPresets[] = {
    {CacheFormat::per_row(DType::kInt8), "int8_per_token_head"},
    {CacheFormat::per_row(DType::kFp8E4M3), "fp8_per_token_head"},
    {CacheFormat::per_row(DType::kUInt4x2), "uint4_per_token_head"}};
/// vLLM's cache of 4 bits.
constexpr std::string_view kRotated = "int4_per_token_head";

}  // namespace

std::string_view version() noexcept {
  return CLATTN_VERSION;
}

std::size_t element_size_bytes(DType dtype) {
  return row_of(kDTypes, dtype, "dtype").size_bytes;
}

bool is_quantized(DType dtype) {
  return element_size_bytes(dtype) == 1;
}

std::string_view to_string(DType dtype) {
  return row_of(kDTypes, dtype, "dtype").name;
}

std::optional<DType> find_dtype(std::string_view name) {
  constexpr std::string_view kTorch = "torch.";
  if (name.starts_with(kTorch)) name.remove_prefix(kTorch.size());
  const auto found = find_named(kDTypes, name);
  return found ? found : find_named(kDTypeSpellings, name);
}

DType parse_dtype(std::string_view name) {
  const auto found = find_dtype(name);
  return found ? *found : parse_named(kDTypes, name, "dtype");
}

namespace {

/// Why a side's format is none of a preset's, the first field first.
std::string why_not(std::string_view side, const SideFormat& format) {
  using enum SideFormat::Group;
  const auto refuse = [&](std::string_view field, auto value, std::string_view legal,
                          std::string_view reason) {
    return fmt::format("cache format: {}.{} is {}, supported: {} ({})", side, field,
                       static_cast<int>(value), legal, reason);
  };
  if (format.group != kRow && format.code == DType::kUInt4x2)
    return refuse("group", format.group, "kRow",
                  "codes of 4 bits have scales in their pages alone");
  if (format.group != kTensor && format.group != kRow)
    return refuse("group", format.group, "kTensor, kRow",
                  "kernels know scales of tensors, of heads, and of a token's head");
  const auto zero = CacheFormat::per_row(format.code).k.zero;
  if (format.zero != zero && zero == SideFormat::Zero::kNone)
    return refuse("zero", format.zero, "kNone", "kernels multiply codes by scales alone");
  if (format.zero != zero)
    return refuse("zero", format.zero, "kInteger", "kernels take one from codes of 4 bits");
  if (format.scale != SideFormat::Scale::kF32)
    return refuse("scale", format.scale, "kF32", "kernels read f32 scales");
  if (format.rotation != 0)
    return refuse("rotation", format.rotation, "0", "no kernel rotates queries");
  const bool of_rows = std::ranges::any_of(
      kPresets, [&](const auto& preset) { return preset.value.k.code == format.code; });
  if (format.group == kRow && !of_rows)
    return fmt::format(
        "cache format: {}.code is {}, supported with group kRow: int8, fp8_e4m3, uint4x2", side,
        to_string(format.code));
  return {};
}

}  // namespace

std::string why_not(const CacheFormat& format) {
  std::string why = why_not("k", format.k);
  if (why.empty()) why = why_not("v", format.v);
  if (why.empty() && format.k != format.v)
    why = "cache format: k and v differ, supported: the same (kernels read both by one loader)";
  return why;
}

std::string_view to_string(const CacheFormat& format) {
  const std::string why = why_not(format);
  if (!why.empty()) detail::throw_unsupported("{}", why);
  const auto* const preset =
      std::ranges::find(kPresets, format, [](const auto& row) { return row.value; });
  return preset == std::end(kPresets) ? to_string(format.k.code) : preset->name;
}

std::optional<CacheFormat> parse_kv_cache_dtype(std::string_view name) {
  if (name == "auto") return std::nullopt;
  if (const auto preset = find_named(kPresets, name)) return preset;
  detail::throw_unsupported_if(
      name == kRotated,
      "kv_cache_dtype: {} not supported: its keys and values are rotated, and no kernel rotates "
      "queries; without rotation: uint4_per_token_head",
      name);
  const auto found = find_dtype(name);
  detail::throw_invalid_if(
      !found && name.starts_with("fp8"),
      "Unrecognized FP8 dtype: {}, legal: fp8, fp8_e4m3, fp8_e5m2, fp8_per_token_head", name);
  if (!found || !why_not(CacheFormat(*found)).empty())
    detail::throw_invalid("kv_cache_dtype: '{}' is not one of auto, {}, {}", name,
                          names_of(kWholeTypes), names_of(kPresets));
  return found;
}

std::string_view to_string(AttentionType type) {
  return row_of(kAttentionTypes, type, "attn_type").name;
}

AttentionType parse_attention_type(std::string_view name) {
  return parse_named(kAttentionTypes, name, "attn_type");
}

std::string_view to_string(SpanRule rule) {
  return row_of(kSpanRules, rule, "span_rule").name;
}

SpanRule parse_span_rule(std::string_view name) {
  return parse_named(kSpanRules, name, "span_rule");
}

std::string_view to_string(KVCacheLayout layout) {
  return row_of(kLayouts, layout, "layout").name;
}

KVCacheLayout parse_kv_cache_layout(std::string_view name) {
  const auto found = find_named(kLayoutSpellings, name);
  return found ? *found : parse_named(kLayouts, name, "layout");
}

std::string_view to_string(KVCacheKind kind) {
  return row_of(kKinds, kind, "kind").name;
}

KVCacheKind parse_kv_cache_kind(std::string_view name) {
  const auto found = find_named(kKindSpellings, name);
  return found ? *found : parse_named(kKinds, name, "kind");
}

}  // namespace clattn
