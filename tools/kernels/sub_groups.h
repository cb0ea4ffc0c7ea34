/* What kernels by sub-groups call of cl_intel_subgroups; clang's own table does not declare it. */
uint __attribute__((overloadable)) intel_sub_group_shuffle(uint value, uint lane);
float __attribute__((overloadable)) intel_sub_group_shuffle(float value, uint lane);
uint __attribute__((overloadable)) intel_sub_group_shuffle_xor(uint value, uint mask);
