#!/bin/sh
# Compiles one dumped kernel file for NVIDIA GPUs: clang and libclc to PTX, which may name no
# undefined function, then ptxas, where CUDA's is present, to machine code. NVIDIA's driver has a
# front end of its own: numbers are a trend. Prints a line per kernel and architecture.
# usage: nvidia.sh FILE.cl      NVIDIA_ARCHS="sm_90" chooses; PTXAS=PATH names the assembler
set -eu
tools=$(cd "$(dirname "$0")" && pwd)
file=$1
name=$(basename "$file" .cl)
options=$(cat "${file%.cl}.options")
libclc=/usr/lib/clc/nvptx64--nvidiacl.bc
ptxas=${PTXAS:-$(command -v ptxas || echo /usr/local/cuda/bin/ptxas)}
# clang does not tell ptxas the work-group size, so the registers a group may have are bounded here.
group=$(echo "$options" | sed -n 's/.*-DCLA_WG_SIZE=\([0-9]*\).*/\1/p')
registers=$((65536 / ${group:-256} / 8 * 8))
[ $registers -le 255 ] || registers=255
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0

failed() {  # ARCH WHY
  echo "nvidia $1 $name FAILED: $2"
  status=1
}

for arch in ${NVIDIA_ARCHS:-sm_75 sm_80 sm_90 sm_120}; do
  front=$arch
  case $arch in sm_1??) front=sm_90 ;; esac  # beyond clang 19; newer chips take older PTX
  chosen=$options  # as the library does from that architecture on
  case $arch-$options in
    sm_7?-* | sm_8[0-8]-* | *-DCLA_PTX=0*) ;;
    *) chosen=$(echo "$options" | sed s/-DCLA_FP8_CVT=0/-DCLA_FP8_CVT=1/) ;;
  esac
  if [ "$arch" = sm_75 ] && grep -q mma.sync.aligned.m16n8k16 "$file"; then
    echo "nvidia $arch $name: left out, its matrix units come with sm_80"
    continue
  fi
  # Instructions behind marks are of one architecture, and the driver inlines all around them.
  marked=
  if grep -q '"//@sm_90a ' "$file"; then
    marked=-Dinline=inline\ __attribute__\(\(always_inline\)\)
    if [ "$arch" != sm_90 ]; then
      echo "nvidia $arch $name: left out, its matrix units are those of sm_90"
      continue
    fi
  fi
  # shellcheck disable=SC2086  # a list of options
  if ! clang-19 -x cl -cl-std=CL1.2 -fgnu-keywords --target=nvptx64--nvidiacl -march=$front -O3 \
    -include "$tools/nvidia_shim.h" -Xclang -finclude-default-header \
    -Xclang -mlink-builtin-bitcode -Xclang $libclc ${marked:+"$marked"} $chosen \
    -S -o "$work/k.ptx" "$file" \
    2> "$work/log"; then
    failed "$arch" "$(grep -m 1 error "$work/log" || tail -1 "$work/log")"
    continue
  fi
  grep -q '\.entry' "$work/k.ptx" || { failed "$arch" "the PTX holds no kernel"; continue; }
  undefined=$(sed -n '/^\.extern \.func/,/;/p' "$work/k.ptx" | tr '\n\t' '  ')
  [ -z "$undefined" ] || { failed "$arch" "undefined: $undefined"; continue; }
  if ! [ -x "$ptxas" ]; then
    echo "nvidia $arch $name: PTX only, no ptxas here"
    continue
  fi
  # CUDA's assembler takes 48 KiB of declared local memory, the OpenCL driver's up to 227: larger
  # arrays are shortened for it, which changes no instruction.
  sed -i -E '/^[.\t ]*\.shared/s/\[[0-9]{5,}\]/[9999]/' "$work/k.ptx"
  limit="-arch=$arch -maxrregcount=$registers"
  if [ -n "$marked" ]; then  # as src/opencl/program/ptx.cpp does
    sed -i -e 's/^\.target sm_90/&a/' -e 's|//@sm_90a ||' \
      -e "/\.entry/,/^)/s/^)/)\n.reqntid $group, 1, 1\n.maxnreg $registers/" "$work/k.ptx"
    limit=-arch=${arch}a
  fi
  # shellcheck disable=SC2086  # two options
  if ! "$ptxas" -v $limit -o "$work/k.cubin" "$work/k.ptx" \
    > "$work/log" 2>&1; then
    failed "$arch" "$(grep -m 1 -E 'error|fatal' "$work/log" || tail -1 "$work/log")"
    continue
  fi
  if grep -q 'C75' "$work/log"; then
    failed "$arch" "$(grep -m 1 C75 "$work/log")"
    continue
  fi
  awk -v head="nvidia $arch $name" '
    /Compiling entry function/ { split($0, part, "\047"); kernel = part[2] }
    /bytes spill stores/ {
      for (i = 1; i < NF; i++) if ($i == "bytes" && $(i + 1) == "spill") spilled += $(i - 1)
    }
    /Used [0-9]+ registers/ {
      for (i = 1; i <= NF; i++) {
        if ($i == "Used") registers = $(i + 1)
        if ($i ~ /^smem/) local_bytes = $(i - 2)
      }
      printf "%s %s: %d registers, %d B local, %d B spilled%s\n", head, kernel, registers,
        local_bytes, spilled, (spilled > 0 ? " SPILLS" : "")
      spilled = local_bytes = 0
      n++
    }
    END {
      if (n == 0) print head " FAILED: ptxas reported no kernel"
      exit n == 0
    }' "$work/log" || status=1
done
exit $status
