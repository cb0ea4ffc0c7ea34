// Moves of vector registers, and work across lanes.
#include "exec/lanes.hpp"
#include "exec/memory.hpp"
#include "exec/packed.hpp"
#include "exec/shapes.hpp"
#include "exec/special.hpp"
#include "exec/table.hpp"

namespace amdemu {

template <int W>
void add_moves(Table& t) {
  V1("v_mov_b32", U32, U32, a);
  V1("v_mov_b64", U64, U64, a);
  V1("v_accvgpr_read_b32", U32, U32, a);
  V1("v_accvgpr_write_b32", U32, U32, a);
  V1("v_accvgpr_mov_b32", U32, U32, a);
  V1("v_mov_b16", U16, U16, a);
  V1("v_not_b32", U32, U32, ~a);
  V1("v_bfrev_b32", U32, U32, __builtin_bitreverse32(a));
  V1("v_ffbh_u32", U32, U32, clz_or_minus1(a));
  V1("v_ffbl_b32", U32, U32, ctz_or_minus1(a));
  V1("v_ffbh_i32", U32, U32, sign_run(a));
  t.alias("v_clz_i32_u32", "v_ffbh_u32");
  t.alias("v_ctz_i32_b32", "v_ffbl_b32");
  t.alias("v_cls_i32", "v_ffbh_i32");
  t.add("v_cndmask_b32", &cndmask<W>);
  t.add("v_cndmask_b16", &cndmask16<W>);
  t.add("v_readfirstlane_b32", &readfirstlane<W>);
  t.add("v_readlane_b32", &readlane<W>);
  t.add("v_writelane_b32", &writelane<W>);
  t.add("v_mbcnt_lo_u32_b32", &mbcnt<W, 0>);
  t.add("v_mbcnt_hi_u32_b32", &mbcnt<W, 1>);
  t.add("v_permlane16_b32", &permlane16<W, false, false>);
  t.add("v_permlanex16_b32", &permlane16<W, true, false>);
  t.add("v_permlane16_var_b32", &permlane16<W, false, true>);
  t.add("v_permlanex16_var_b32", &permlane16<W, true, true>);
  t.add("v_permlane64_b32", &permlane64<W>);
  t.add("v_swap_b32", &swap<W>);
  t.add("v_permlane16_swap_b32", &permlane_swap<W, 16>);
  t.add("v_permlane32_swap_b32", &permlane_swap<W, 32>);
  t.add("v_bitop3_b32", &bitop3<W>);
  t.add("v_bitop3_b16", &bitop3_16<W>);
  t.add("ds_read_b64_tr_b16", &load_transposed<W, 4>);
  t.add("ds_read_b64_tr_b8", &load_transposed<W, 8>);
  t.add("ds_read_b64_tr_b4", &load_transposed<W, 16>);
  const Handler nothing = [](Wave&, const Instruction&) {};
  t.add("v_nop", nothing, 0);
  t.add("v_pipeflush", nothing, 0);
  t.add("v_pk_mov_b32", &pk_mov<W>);
  t.add("ds_bpermute_b32", &bpermute<W>);
  t.add("ds_permute_b32", &permute<W>);
  t.add("ds_swizzle_b32", &swizzle<W>);
}
template void add_moves<32>(Table& t);
template void add_moves<64>(Table& t);

}  // namespace amdemu
