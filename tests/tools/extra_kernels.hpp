#pragma once

#include <array>

/// A kernel that no variant row names.
struct Extra {
  const char* name;
  const char* file;
  const char* options;
  const char* kind;
  const char* unit = "";  ///< what it includes as tile/unit.clh
};

// Kernels of recurrent layers (kernels_cl/recurrent/gates.clh explains their macros): Qwen 3.5's
// layers, KDA, Mamba 2 and lightning attention.
#define CLA_QWEN                                                                    \
  "-DCLA_Q_DTYPE=2 -DCLA_KV_DTYPE=0 -DCLA_GATE_DTYPE=2 -DCLA_GATES=1 -DCLA_RULE=0 " \
  "-DCLA_BY_CHANNEL=0 -DCLA_LOWER_BOUND=0 -DCLA_HAS_BIAS=1 -DCLA_SOFTPLUS=0 "       \
  "-DCLA_L2_NORM=1 -DCLA_SKIP=0 -DCLA_HAS_Z=0 -DCLA_K_DIM=128 -DCLA_V_DIM=128 "
#define CLA_KDA                                                                     \
  "-DCLA_Q_DTYPE=2 -DCLA_KV_DTYPE=0 -DCLA_GATE_DTYPE=2 -DCLA_GATES=1 -DCLA_RULE=0 " \
  "-DCLA_BY_CHANNEL=1 -DCLA_LOWER_BOUND=1 -DCLA_HAS_BIAS=1 -DCLA_SOFTPLUS=0 "       \
  "-DCLA_L2_NORM=1 -DCLA_SKIP=0 -DCLA_HAS_Z=0 -DCLA_K_DIM=128 -DCLA_V_DIM=128 "
#define CLA_MAMBA                                                                   \
  "-DCLA_Q_DTYPE=1 -DCLA_KV_DTYPE=1 -DCLA_GATE_DTYPE=1 -DCLA_GATES=2 -DCLA_RULE=1 " \
  "-DCLA_BY_CHANNEL=0 -DCLA_LOWER_BOUND=0 -DCLA_HAS_BIAS=1 -DCLA_SOFTPLUS=1 "       \
  "-DCLA_L2_NORM=0 -DCLA_SKIP=1 -DCLA_HAS_Z=1 -DCLA_K_DIM=128 -DCLA_V_DIM=64 "
#define CLA_LIGHTNING                                                               \
  "-DCLA_Q_DTYPE=0 -DCLA_KV_DTYPE=2 -DCLA_GATE_DTYPE=0 -DCLA_GATES=3 -DCLA_RULE=1 " \
  "-DCLA_BY_CHANNEL=0 -DCLA_LOWER_BOUND=0 -DCLA_HAS_BIAS=0 -DCLA_SOFTPLUS=0 "       \
  "-DCLA_L2_NORM=0 -DCLA_SKIP=0 -DCLA_HAS_Z=0 -DCLA_K_DIM=96 -DCLA_V_DIM=96 "
#define CLA_GIVEN                                                                   \
  "-DCLA_Q_DTYPE=1 -DCLA_KV_DTYPE=0 -DCLA_GATE_DTYPE=0 -DCLA_GATES=0 -DCLA_RULE=0 " \
  "-DCLA_BY_CHANNEL=1 -DCLA_LOWER_BOUND=0 -DCLA_HAS_BIAS=0 -DCLA_SOFTPLUS=0 "       \
  "-DCLA_L2_NORM=0 -DCLA_SKIP=0 -DCLA_HAS_Z=0 -DCLA_K_DIM=256 -DCLA_V_DIM=64 "
#define CLA_LOOP_VEC "-DCLA_WG_SIZE=1 -DCLA_VEC=16 -DCLA_LANES=1 -DCLA_LANE_ROWS=16"
#define CLA_LOOP_WG "-DCLA_WG_SIZE=64 -DCLA_VEC=4 -DCLA_ALIGNED=1 -DCLA_LANES=8 -DCLA_LANE_ROWS=4"
#define CLA_CHUNK_VEC \
  "-DCLA_WG_SIZE=1 -DCLA_VEC=16 -DCLA_CHUNK=16 -DCLA_ROWS=32 -DCLA_ROW_VEC=16 -DCLA_TOKEN_BLOCK=8"
#define CLA_CHUNK_WG \
  "-DCLA_WG_SIZE=128 -DCLA_VEC=4 -DCLA_CHUNK=16 -DCLA_ROWS=32 -DCLA_ROW_VEC=1 -DCLA_TOKEN_BLOCK=4"
#define CLA_SMALL_CHUNK_WG \
  "-DCLA_WG_SIZE=128 -DCLA_VEC=4 -DCLA_CHUNK=8 -DCLA_ROWS=16 -DCLA_ROW_VEC=1 -DCLA_TOKEN_BLOCK=4"
#define CLA_RULE_DPAS                                                      \
  "-DCLA_PTX=0 -DCLA_VEC=4 -DCLA_CHUNK=16 -DCLA_WG_SIZE=64 -DCLA_ROWS=64 " \
  "-cl-intel-256-GRF-per-thread "

inline constexpr std::array kRecurrentKernels = {
    Extra{"delta_rule_loop__vec", "recurrent/delta_rule_loop.cl", CLA_QWEN CLA_LOOP_VEC, "cpu"},
    Extra{"delta_rule_loop__wg64", "recurrent/delta_rule_loop.cl", CLA_QWEN CLA_LOOP_WG, "gpu"},
    Extra{"delta_rule_loop__wg64_kda", "recurrent/delta_rule_loop.cl", CLA_KDA CLA_LOOP_WG, "gpu"},
    Extra{"delta_rule_loop__wg64_mamba", "recurrent/delta_rule_loop.cl", CLA_MAMBA CLA_LOOP_WG,
          "gpu"},
    Extra{"delta_rule_loop__wg64_lightning", "recurrent/delta_rule_loop.cl",
          CLA_LIGHTNING CLA_LOOP_WG, "gpu"},
    Extra{"delta_rule_loop__vec_given", "recurrent/delta_rule_loop.cl", CLA_GIVEN CLA_LOOP_VEC,
          "cpu"},
    Extra{"delta_rule_chunk__vec", "recurrent/delta_rule_chunk.cl", CLA_QWEN CLA_CHUNK_VEC, "cpu"},
    Extra{"delta_rule_chunk__vec_kda", "recurrent/delta_rule_chunk.cl", CLA_KDA CLA_CHUNK_VEC,
          "cpu"},
    Extra{"delta_rule_chunk__wg128", "recurrent/delta_rule_chunk.cl", CLA_QWEN CLA_CHUNK_WG, "gpu"},
    Extra{"delta_rule_chunk__wg128_kda", "recurrent/delta_rule_chunk.cl",
          CLA_KDA CLA_SMALL_CHUNK_WG, "gpu"},
    Extra{"delta_rule_chunk__wg128_mamba", "recurrent/delta_rule_chunk.cl", CLA_MAMBA CLA_CHUNK_WG,
          "gpu"},
    Extra{"delta_rule_chunk__wg128_lightning", "recurrent/delta_rule_chunk.cl",
          CLA_LIGHTNING CLA_CHUNK_WG, "gpu"},
    Extra{"delta_rule_pairs__c32", "recurrent/delta_rule_pairs.cl",
          CLA_QWEN "-DCLA_PTX=1 -DCLA_VEC=4 -DCLA_CHUNK=32 -DCLA_WG_SIZE=128", "gpu",
          "tile/sm80.clh"},
    Extra{"delta_rule_pairs__mfma", "recurrent/delta_rule_pairs.cl",
          CLA_QWEN "-DCLA_PTX=0 -DCLA_VEC=4 -DCLA_CHUNK=32 -DCLA_WG_SIZE=128",
          "amd gfx908 gfx90a gfx942", "tile/mfma.clh"},
    Extra{"delta_rule_pairs__wmma", "recurrent/delta_rule_pairs.cl",
          CLA_QWEN "-DCLA_PTX=0 -DCLA_VEC=4 -DCLA_CHUNK=32 -DCLA_WG_SIZE=128",
          "amd gfx1100 gfx1201", "tile/wmma.clh"},
    Extra{"delta_rule_pairs__dpas16", "recurrent/delta_rule_pairs.cl",
          CLA_QWEN "-DCLA_PTX=0 -DCLA_VEC=4 -DCLA_CHUNK=16 -DCLA_WG_SIZE=128 -DCLA_SUB_GROUP=16 "
                   "-cl-intel-256-GRF-per-thread",
          "gpu", "tile/dpas.clh"},
    Extra{"delta_rule_mma__c32", "recurrent/delta_rule_mma.cl",
          CLA_QWEN "-DCLA_PTX=1 -DCLA_VEC=4 -DCLA_CHUNK=32 -DCLA_WG_SIZE=64 -DCLA_ROWS=32", "gpu",
          "tile/sm80.clh"},
    Extra{"delta_rule_mma__c32_rows128", "recurrent/delta_rule_mma.cl",
          CLA_QWEN "-DCLA_PTX=1 -DCLA_VEC=4 -DCLA_CHUNK=32 -DCLA_WG_SIZE=256 -DCLA_ROWS=128", "gpu",
          "tile/sm80.clh"},
    Extra{"delta_rule_mma__mfma", "recurrent/delta_rule_mma.cl",
          CLA_QWEN "-DCLA_PTX=0 -DCLA_VEC=4 -DCLA_CHUNK=32 -DCLA_WG_SIZE=64 -DCLA_ROWS=32",
          "amd gfx908 gfx90a gfx942", "tile/mfma.clh"},
    Extra{"delta_rule_mma__wmma", "recurrent/delta_rule_mma.cl",
          CLA_QWEN "-DCLA_PTX=0 -DCLA_VEC=4 -DCLA_CHUNK=32 -DCLA_WG_SIZE=64 -DCLA_ROWS=32",
          "amd gfx1100 gfx1201", "tile/wmma.clh"},
    Extra{"delta_rule_mma__dpas8", "recurrent/delta_rule_mma.cl",
          CLA_QWEN CLA_RULE_DPAS "-DCLA_SUB_GROUP=8", "gpu", "tile/dpas.clh"},
    Extra{"delta_rule_mma__dpas16", "recurrent/delta_rule_mma.cl",
          CLA_QWEN CLA_RULE_DPAS "-DCLA_SUB_GROUP=16", "gpu", "tile/dpas.clh"},
    Extra{"causal_conv1d__vec", "recurrent/causal_conv1d.cl",
          "-DCLA_WG_SIZE=1 -DCLA_VEC=16 -DCLA_Q_DTYPE=0 -DCLA_KV_DTYPE=0 -DCLA_WIDTH=4 "
          "-DCLA_TOKENS=32 -DCLA_SILU=1 -DCLA_HAS_BIAS=1 -DCLA_CONV_GATES=0",
          "cpu"},
    Extra{"causal_conv1d__wg128", "recurrent/causal_conv1d.cl",
          "-DCLA_WG_SIZE=128 -DCLA_VEC=4 -DCLA_ALIGNED=1 -DCLA_Q_DTYPE=2 -DCLA_KV_DTYPE=2 "
          "-DCLA_WIDTH=4 -DCLA_TOKENS=32 -DCLA_SILU=1 -DCLA_HAS_BIAS=0 -DCLA_CONV_GATES=0",
          "gpu"},
    Extra{"causal_conv1d__wg128_gates", "recurrent/causal_conv1d.cl",
          "-DCLA_WG_SIZE=128 -DCLA_VEC=4 -DCLA_Q_DTYPE=1 -DCLA_KV_DTYPE=1 -DCLA_WIDTH=3 "
          "-DCLA_TOKENS=32 -DCLA_SILU=0 -DCLA_HAS_BIAS=0 -DCLA_CONV_GATES=1",
          "gpu"},
    Extra{"rms_norm_gated__vec", "recurrent/rms_norm_gated.cl",
          "-DCLA_WG_SIZE=1 -DCLA_VEC=16 -DCLA_Q_DTYPE=0 -DCLA_KV_DTYPE=0 -DCLA_LANES=1 "
          "-DCLA_GATE=1 -DCLA_GATE_FIRST=0",
          "cpu"},
    Extra{"rms_norm_gated__wg128", "recurrent/rms_norm_gated.cl",
          "-DCLA_WG_SIZE=128 -DCLA_VEC=4 -DCLA_Q_DTYPE=2 -DCLA_KV_DTYPE=0 -DCLA_LANES=32 "
          "-DCLA_GATE=2 -DCLA_GATE_FIRST=1",
          "gpu"},
    Extra{"mamba_copy_blocks__vec", "recurrent/mamba_copy_blocks.cl",
          "-DCLA_WG_SIZE=1 -DCLA_COPY_BYTES=16", "cpu"},
    Extra{"mamba_copy_blocks__wg128", "recurrent/mamba_copy_blocks.cl",
          "-DCLA_WG_SIZE=128 -DCLA_COPY_BYTES=1", "gpu"},
};
