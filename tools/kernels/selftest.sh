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
kernel '__kernel void k(__global float* x, int page, int stride) { const long at = page * stride; x[at] = 0.0f; }'
expect fails lint
kernel '__kernel void k(__global float* x) { int unused = 1; x[0] = 0.0f; }'
expect fails lint
kernel '__kernel void k(__global float* pipe) { pipe[0] = 0.0f; }'
expect fails lint
kernel 'static float f(float x) { return x; }'
expect fails intel amd nvidia
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
echo "kernel checks: every seeded defect refused"
