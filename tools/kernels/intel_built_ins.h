/* What Intel's driver declares for GPUs with matrix units (dg2, pvc and later) and ocloc 22.43,
   which compiles calls of it, does not. */
#define cl_intel_subgroup_matrix_multiply_accumulate 1
#define cl_intel_subgroup_local_block_io 1
#define cl_intel_bfloat16_conversions 1
#define DECLARED __attribute__((overloadable))
float8 DECLARED intel_sub_group_f16_f16_matrix_mad_k16(int8 a, int8 b, float8 sum);
float8 DECLARED intel_sub_group_f16_f16_matrix_mad_k16(short8 a, int8 b, float8 sum);
float8 DECLARED intel_sub_group_bf16_bf16_matrix_mad_k16(int8 a, int8 b, float8 sum);
float8 DECLARED intel_sub_group_bf16_bf16_matrix_mad_k16(short8 a, int8 b, float8 sum);
uint8 DECLARED intel_sub_group_block_read8(const __local uint* from);
ushort8 DECLARED intel_sub_group_block_read_us8(const __local ushort* from);
ushort2 DECLARED intel_convert_bfloat162_as_ushort2(float2 value);
#undef DECLARED
