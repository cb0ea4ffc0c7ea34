#!/bin/sh
# Compiles one dumped kernel file for Intel GPUs with ocloc and prints a line per kernel and device.
# ocloc ends with 0 although a function is undefined, so the SPIR-V must import nothing and the
# binary must hold a kernel.
# usage: intel.sh FILE.cl       INTEL_DEVICES="skl pvc" chooses devices
set -eu
file=$1
name=$(basename "$file" .cl)
options=$(cat "${file%.cl}.options")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0

failed() {  # DEVICE WHY
  echo "intel $1 $name FAILED: $2"
  status=1
}

for device in ${INTEL_DEVICES:-skl tgllp dg2-g10 pvc}; do
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
  undefined=$(spirv-dis "$out/k.spv" | sed -n 's/.*LinkageAttributes "\([^"]*\)" Import.*/\1/p' |
    grep -v '^__spirv_BuiltIn' | tr '\n' ' ' || true)
  [ -z "$undefined" ] || failed "$device" "undefined: $undefined"
  binary=$out/k
  [ -e "$binary" ] || binary=$out/k.bin
  ocloc disasm -file "$binary" -device "$device" -dump "$out/dump" > "$out/log" 2>&1 || true
  [ -e "$out/dump/.ze_info" ] || { failed "$device" "no .ze_info in the binary"; continue; }
  awk -v head="intel $device $name" '
    /^[a-z_]+:/ { in_kernels = /^kernels:/ }
    !in_kernels { next }
    /^  - name:/ { kernel[++n] = $3 }
    $1 == "grf_count:" { grf[n] = $2 }
    $1 == "simd_size:" { simd[n] = $2 }
    $1 == "slm_size:" { local_bytes[n] = $2 }
    $1 == "-" && $2 == "type:" { scratch_next = $3 == "scratch" }
    $1 == "type:" { scratch_next = $2 == "scratch" }
    $1 == "size:" && scratch_next { scratch[n] = $2; scratch_next = 0 }
    END {
      for (i = 1; i <= n; i++)
        printf "%s %s: SIMD%d, %d registers, %d B local, %d B scratch%s\n", head, kernel[i],
          simd[i], grf[i], local_bytes[i], scratch[i], (scratch[i] > 0 ? " SPILLS" : "")
      if (n == 0) print head " FAILED: the binary holds no kernel"
      exit n == 0
    }' "$out/dump/.ze_info" || status=1
done
exit $status
