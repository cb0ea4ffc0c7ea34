#!/bin/sh
# Compiles one dumped kernel file for Intel GPUs with ocloc and prints a line per kernel and device.
# ocloc ends with 0 although a function is undefined, so the SPIR-V must import nothing and the
# binary must hold a kernel. A kernel on the matrix unit is for devices with sub-groups of its size
# alone: it may import products, and its assembly must have them.
# usage: intel.sh FILE.cl       INTEL_DEVICES="skl pvc" chooses devices
set -eu
file=$1
name=$(basename "$file" .cl)
options=$(cat "${file%.cl}.options")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0

# The tool that prints assembly asks for the library under this name.
mkdir "$work/lib"
ln -s /usr/lib/x86_64-linux-gnu/libiga64.so.1 "$work/lib/libiga64.so"

devices=${INTEL_DEVICES:-skl tgllp dg2-g10 pvc}
lanes=
case $options in
  *-cl-intel-256-GRF-per-thread*)
    lanes=$(echo "$options" | sed -n 's/.*-DCLA_SUB_GROUP=\([0-9]*\).*/\1/p')
    cat "$(dirname "$0")/intel_built_ins.h" "$file" > "$work/$name.cl"
    file=$work/$name.cl
    ;;
esac
case $lanes in
  8) devices=dg2-g10 ;;
  16) devices=pvc ;;
esac

failed() {  # DEVICE WHY
  echo "intel $1 $name FAILED: $2"
  status=1
}

for device in $devices; do
  out=$work/$device
  mkdir -p "$out/dump"
  if ! ocloc compile --format zebin -file "$file" -device "$device" \
    -options "-cl-std=CL1.2 $options" -output k -output_no_suffix -out_dir "$out" \
    > "$out/log" 2>&1; then
    failed "$device" "$(grep -m 1 error "$out/log" || tail -1 "$out/log")"
    continue
  fi
  if ! [ -s "$out/k.spv" ]; then
    failed "$device" "no SPIR-V to judge"
    continue
  fi
  # spirv-dis does not know conversions to bf16: of such a kernel the assembly alone is judged.
  undefined=$(spirv-dis "$out/k.spv" 2> /dev/null |
    sed -n 's/.*LinkageAttributes "\([^"]*\)" Import.*/\1/p' |
    grep -v '^__spirv_BuiltIn' | grep -v 'intel_sub_group_b\?f16_b\?f16_matrix_mad_k16' |
    tr '\n' ' ' || true)
  [ -z "$undefined" ] || failed "$device" "undefined: $undefined"
  binary=$out/k
  [ -e "$binary" ] || binary=$out/k.bin
  LD_LIBRARY_PATH=$work/lib \
    ocloc disasm -file "$binary" -device "$device" -dump "$out/dump" > "$out/log" 2>&1 || true
  [ -e "$out/dump/.ze_info" ] || { failed "$device" "no .ze_info in the binary"; continue; }
  products=
  if [ -n "$lanes" ]; then
    assembly=$(cat "$out"/dump/.text.clattn_*.asm 2> /dev/null || true)
    count=$(echo "$assembly" | grep -c '^ *dpas' || true)
    products=", $count dpas, $(echo "$assembly" | grep -c ' send\.' || true) sends"
    products="$products, $(echo "$assembly" | grep -c ' mov (' || true) movs"
    [ "$count" -gt 0 ] || failed "$device" "no matrix products in the assembly"
  fi
  awk -v head="intel $device $name" -v products="$products" '
    /^[a-z_]+:/ { in_kernels = /^kernels:/ }
    !in_kernels { next }
    /^  - name:/ { kernel[++n] = $3 }
    $1 == "grf_count:" { grf[n] = $2 }
    $1 == "simd_size:" { simd[n] = $2 }
    $1 == "slm_size:" { local_bytes[n] = $2 }
    # Arrays that did not fit registers lie in scratch, too, or in a private space.
    $1 == "-" && $2 == "type:" { scratch_next = $3 == "scratch" }
    $1 == "type:" { scratch_next = $2 == "scratch" }
    $1 == "usage:" && $2 == "private_space" { scratch_next = 1 }
    $1 == "size:" && scratch_next { scratch[n] = $2; scratch_next = 0 }
    END {
      for (i = 1; i <= n; i++) {
        if (kernel[i] ~ /^Intel_Symbol_Table/) continue
        printf "%s %s: SIMD%d, %d registers, %d B local, %d B scratch%s%s\n", head, kernel[i],
          simd[i], grf[i], local_bytes[i], scratch[i], products, (scratch[i] > 0 ? " SPILLS" : "")
      }
      if (n == 0) print head " FAILED: the binary holds no kernel"
      exit n == 0
    }' "$out/dump/.ze_info" || status=1
done
exit $status
