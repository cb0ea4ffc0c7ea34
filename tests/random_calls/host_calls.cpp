// Calls that use no device.
#include <clattn/attn_utils.hpp>
#include <clattn/compat/page.hpp>
#include <clattn/compat/v0_slot_mapping.hpp>
#include <clattn/reorder.hpp>

#include "random_calls/world.hpp"

using namespace clattn;
using test::kBlocks;
using test::World;

static void plan_on_host(World& world) {
  const auto made = world.batch(16);
  std::vector<std::int64_t> slots(static_cast<std::size_t>(world.dice.below(70)));
  std::vector<std::int32_t> order(static_cast<std::size_t>(made.batch.seq_lens.size()));
  switch (world.dice.below(6)) {
    case 0:
      compute_slot_mapping(made.batch, 16, slots);
      break;
    case 1:
      split_decodes_and_prefills(made.batch, 1);
      break;
    case 2:
      build_paged_kv_metadata(made.batch, 16);
      break;
    case 3:
      validate_batch(made.batch, 16, kBlocks);
      break;
    case 4:
      reorder_batch_to_split_decodes_and_prefills(made.seq_lens, 1, order);
      break;
    default:
      map_to_kernel_blocks(made.block_table, 16, world.dice.one_in(2) ? 8 : 5, order);
  }
}

static void read_names(World& world) {
  static constexpr std::array kNames = {"f16", "auto", "torch.float", "NHD", "", "fp8", "x", "gpu"};
  const std::string_view name = world.dice.pick(kNames);
  switch (world.dice.below(4)) {
    case 0:
      parse_kv_cache_dtype(name);
      break;
    case 1:
      parse_kv_cache_layout(name);
      break;
    case 2:
      parse_kernel_family(name);
      break;
    default:
      extract_layer_index(name);
  }
}

std::span<const test::RandomCall> test::host_calls() {
  static constexpr auto kCalls = std::to_array<RandomCall>({
      {"metadata on the host", 100, plan_on_host},
      {"names", 30, read_names},
  });
  return kCalls;
}
