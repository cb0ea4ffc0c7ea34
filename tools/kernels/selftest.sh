#!/bin/sh
# Proves that each check refuses what it is for and passes a clean kernel.
# usage: AMD_BITCODE=DIR selftest.sh
set -eu
tools=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

kernel() {  # BODY [NAME]: the one kernel file, or one more under that name
  [ $# = 2 ] || rm -rf "$work/kernels"
  mkdir -p "$work/kernels"
  file=$work/kernels/${2:-k}
  printf '%s\n' "$1" > "$file.cl"
  echo "-DCLA_WG_SIZE=64" > "$file.options"
  echo gpu > "$file.kind"
}

expect() {  # passes|fails CHECK...
  expected=$1
  shift
  for check in "$@"; do
    got=passes
    sh "$tools/check_all.sh" "$work/kernels" "$check" > "$work/log" 2>&1 || got=fails
    if [ $got != "$expected" ]; then
      echo "selftest: $check $got a kernel that it should not:"
      cat "$work"/kernels/*.cl "$work/log"
      exit 1
    fi
  done
}

kernel '__kernel void k(__global float* x) { x[get_global_id(0)] += native_exp2(x[0]); }'
expect passes lint intel amd nvidia
kernel 'float f(float); __kernel void k(__global float* x) { x[0] = f(x[1]); }'
expect fails intel amd nvidia
kernel '__kernel void k(__global float* x) { x[0] = sub_group_reduce_add(x[1]); }'
expect fails lint
kernel '#pragma OPENCL EXTENSION cl_khr_fp16 : enable
__kernel void k(__global half* x) { x[0] = x[1] * x[2]; }'
expect fails lint
kernel '__kernel void k(__global float* x) { x[0] *= 0.5; }'
expect fails lint
kernel '__kernel void k(__global float* x, int page, int stride) {
  const long at = page * stride;
  x[at] = 0.0f;
}'
expect fails lint
kernel '__kernel void k(__global float* x) { int unused = 1; x[0] = 0.0f; }'
expect fails lint
kernel '__kernel void k(__global float* pipe) { pipe[0] = 0.0f; }'
expect fails lint
kernel 'static float f(float x) { return x; }'
expect fails intel amd nvidia
# A loop of known length, whose guard clang before 21 compiles wrong (amd.sh).
kernel '__kernel __attribute__((reqd_work_group_size(64, 1, 1))) void
k(__global ushort* x, uint y) {
  for (uint i = (uint)get_local_id(0); i < 512u; i += 64u)
    x[i] = (ushort)((i / 32u * 128u + i % 32u + y) * 2654435761u >> 20 & 1u);
}'
expect passes lint intel nvidia
expect fails amd
# A variant's later configurations, which go to few chips in turn.
export CHIPS=few
for last in k__d2 k__d3; do
  rm "$work"/kernels/*
  kernel '__kernel void k(__global float* x) { x[0] = 0.0f; }' k__d1
  kernel '__kernel void k(__global float* x) { x[0] = 1.0f; }' k__d2
  kernel '__kernel void k(__global float* x) { x[0] = 2.0f; }' $last
  expect passes lint intel amd nvidia
  kernel 'float f(float); __kernel void k(__global float* x) { x[0] = f(x[1]); }' $last
  expect fails intel amd nvidia
done
rm "$work"/kernels/*
expect fails lint intel amd nvidia

# A tile loop of one product; then the same with a move between lanes, and with scratch memory.
loop() {  # BODY
  kernel "__kernel void k(__global float16* x, __global half4* y, int n) {
    float16 sum = x[0];
    for (int i = 0; i < n; ++i) {
      $1
      sum = __builtin_amdgcn_mfma_f32_32x32x8f16(y[i], y[i], sum, 0, 0, 0);
    }
    x[0] = sum;
  }" prefill_k__d128_f16_f16
  echo "-DCLA_WG_SIZE=64 -DCLA_BLOCK_KV=32" > "$file.options"
  echo amd gfx942 > "$file.kind"
  echo prefill 16 32 64 > "$file.traits"
}
loops() {
  python3 "$tools/loops.py" --table "$work/loops.txt" "$@" "$work/kernels" > "$work/log"
}
loop ''
loops --write
loops
for worse in 'sum.x = __builtin_amdgcn_ds_bpermute(4 * i, (int)sum.y);' \
  'volatile int array[64]; array[i] = i;'; do
  loop "$worse"
  if loops; then
    echo "selftest: loops.py accepted a worse loop: $worse"
    exit 1
  fi
  grep -q WORSE "$work/log" || { cat "$work/log"; exit 1; }
done
echo "kernel checks: every seeded defect refused"
