// Jumps, barriers, waits, the MODE register and scalar loads.
#include <sstream>

#include "exec/scalar.hpp"
#include "exec/table.hpp"

namespace amdemu {
namespace {

/// Waits, hints, cache control: results are there at once, and there are no caches.
constexpr const char* kWithoutEffect =
    "s_nop s_sleep s_sethalt s_setprio s_sendmsg s_delay_alu s_clause s_code_end "
    "s_incperflevel s_decperflevel s_ttracedata s_wakeup s_version s_inst_prefetch "
    "s_set_inst_prefetch_distance s_prefetch_inst s_prefetch_data s_prefetch_inst_pc_rel "
    "s_prefetch_data_pc_rel s_waitcnt s_waitcnt_depctr s_waitcnt_vscnt s_waitcnt_vmcnt "
    "s_waitcnt_lgkmcnt s_waitcnt_expcnt s_wait_loadcnt s_wait_storecnt s_wait_samplecnt "
    "s_wait_bvhcnt s_wait_expcnt s_wait_dscnt s_wait_kmcnt s_wait_loadcnt_dscnt "
    "s_wait_storecnt_dscnt s_wait_alu s_wait_idle s_wait_event s_barrier_signal s_icache_inv "
    "s_dcache_inv s_dcache_wb s_dcache_inv_vol s_gl1_inv buffer_wbl2 buffer_inv "
    "buffer_wbinvl1 buffer_wbinvl1_vol buffer_invl2 buffer_gl0_inv buffer_gl1_inv global_wb "
    "global_inv global_wbinv";

template <int kWords>
void add_scalar_load(Table& t, const std::string& old_name, const std::string& new_name) {
  t.add("s_load_dword" + old_name, &scalar_load<kWords>);
  t.add("s_load_" + new_name, &scalar_load<kWords>);
}

}  // namespace

#define BRANCH(NAME, EXPR) \
  t.add(NAME, &branch_if<decltype([](UNUSED const Wave& w) { return EXPR; })>, 0)
template <int W>
void add_control(Table& t) {
  BRANCH("s_branch", true);
  BRANCH("s_cbranch_scc0", w.s[kScc] == 0);
  BRANCH("s_cbranch_scc1", w.s[kScc] != 0);
  BRANCH("s_cbranch_vccz", read_mask<W>(w, kVcc) == 0);
  BRANCH("s_cbranch_vccnz", read_mask<W>(w, kVcc) != 0);
  BRANCH("s_cbranch_execz", exec_of<W>(w) == 0);
  BRANCH("s_cbranch_execnz", exec_of<W>(w) != 0);
  t.add("s_getpc_b64", &getpc);
  t.add("s_setpc_b64", &setpc, 0);
  t.add("s_swappc_b64", &swappc);
  t.add("s_endpgm", &end_program, 0);
  t.add("s_endpgm_saved", &end_program, 0);
  t.add("s_barrier", &barrier, 0);
  t.add("s_barrier_wait", &barrier, 0);
  t.add("s_trap", &trap, 0);
  std::istringstream names(kWithoutEffect);
  for (std::string name; names >> name;) t.add(name, &nothing, 0);
  t.add("s_round_mode", &round_mode, 0);
  t.add("s_denorm_mode", &denorm_mode, 0);
  t.add("s_setreg_b32", &setreg, 0);
  t.add("s_setreg_imm32_b32", &setreg, 0);
  t.add("s_getreg_b32", &getreg);
  add_scalar_load<1>(t, "", "b32");
  add_scalar_load<2>(t, "x2", "b64");
  add_scalar_load<4>(t, "x4", "b128");
  add_scalar_load<8>(t, "x8", "b256");
  add_scalar_load<16>(t, "x16", "b512");
  t.add("s_load_b96", &scalar_load<3>);
  t.add("s_load_u8", &scalar_load_part<u8>);
  t.add("s_load_i8", &scalar_load_part<i8>);
  t.add("s_load_u16", &scalar_load_part<u16>);
  t.add("s_load_i16", &scalar_load_part<i16>);
}
template void add_control<32>(Table& t);
template void add_control<64>(Table& t);

}  // namespace amdemu
