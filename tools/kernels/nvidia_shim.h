/* Only for the offline check with clang: libclc turns these functions into LLVM intrinsics for
   which the NVPTX back end has no instruction. NVIDIA's own compiler, which runs the kernels, needs
   none of this. */
#define CLA_SHIM static inline __attribute__((overloadable, always_inline))
CLA_SHIM float cla_shim_exp2(float x) { return __nvvm_ex2_approx_ftz_f(x); }
CLA_SHIM float cla_shim_log2(float x) { return __nvvm_lg2_approx_ftz_f(x); }
CLA_SHIM float cla_shim_recip(float x) { return __nvvm_rcp_approx_ftz_f(x); }
CLA_SHIM float cla_shim_exp(float x) { return cla_shim_exp2(x * 0x1.715476p+0f); }
CLA_SHIM float cla_shim_log(float x) { return cla_shim_log2(x) * 0x1.62e43p-1f; }

#define CLA_SHIM_HALVES(f, type) \
  CLA_SHIM type f(type x) { return (type)(f(x.lo), f(x.hi)); }
#define CLA_SHIM_VECTORS(f)  \
  CLA_SHIM_HALVES(f, float2) \
  CLA_SHIM_HALVES(f, float4) \
  CLA_SHIM_HALVES(f, float8) \
  CLA_SHIM_HALVES(f, float16)
CLA_SHIM_VECTORS(cla_shim_exp2)
CLA_SHIM_VECTORS(cla_shim_log2)
CLA_SHIM_VECTORS(cla_shim_recip)
CLA_SHIM_VECTORS(cla_shim_exp)
CLA_SHIM_VECTORS(cla_shim_log)

#define exp2 cla_shim_exp2
#define native_exp2 cla_shim_exp2
#define log2 cla_shim_log2
#define native_log2 cla_shim_log2
#define exp cla_shim_exp
#define native_exp cla_shim_exp
#define log cla_shim_log
#define native_log cla_shim_log
#define native_recip cla_shim_recip
