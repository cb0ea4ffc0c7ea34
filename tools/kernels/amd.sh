#!/bin/sh
# Compiles one dumped kernel file for AMD GPUs with clang and links it to a code object, which fails
# on undefined functions; prints a line per kernel and chip.
# usage: AMD_BITCODE=DIR amd.sh FILE.cl     DIR: from amd_bitcode.sh; AMD_CHIPS="gfx906" chooses
set -eu
file=$1
name=$(basename "$file" .cl)
options=$(cat "${file%.cl}.options")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0

chips="gfx906 gfx90a gfx942 gfx1030 gfx1100 gfx1201"
has=$chips
case $(cat "${file%.cl}.kind") in
  amd*) has=$(cut -d' ' -f2- "${file%.cl}.kind") chips=$has ;;  # a matrix unit's chips
esac
for chip in ${AMD_CHIPS:-$chips}; do
  case " $has " in *" $chip "*) ;; *) continue ;; esac
  # shellcheck disable=SC2086  # a list of options
  if ! clang-19 -x cl -cl-std=CL1.2 --target=amdgcn-amd-amdhsa -mcpu="$chip" -O3 \
    --rocm-device-lib-path="${AMD_BITCODE:?}" -Rpass-analysis=kernel-resource-usage $options \
    -o "$work/code_object" "$file" 2> "$work/log"; then
    echo "amd $chip $name FAILED: $(grep -m 1 error "$work/log" || tail -1 "$work/log")"
    status=1
    continue
  fi
  # Clang before 21 may turn c >= s into s >= c here (llvm-project#146398).
  llvm-objdump-19 -d "$work/code_object" > "$work/code"
  if grep -qE 'v_cmpx_[gl]e_u32_e64 (s[0-9]|vcc)' "$work/code"; then
    echo "amd $chip $name FAILED: v_cmpx whose operands the compiler may have swapped"
    status=1
  fi
  awk -v head="amd $chip $name" '
    !/remark:/ { next }
    { sub(/.*remark: */, ""); sub(/ \[-Rpass.*/, "") }
    /^Function Name:/ { kernel[++n] = $3 }
    /^SGPRs:/ { sgpr[n] = $2 }
    /^VGPRs:/ { vgpr[n] = $2 }
    /^AGPRs:/ { agpr[n] = $2 }
    /^ScratchSize/ { scratch[n] = $NF }
    /^Occupancy/ { waves[n] = $NF }
    /^VGPRs Spill:/ { spill[n] = $3 }
    /^LDS Size/ { local_bytes[n] = $NF }
    END {
      for (i = 1; i <= n; i++)
        printf "%s %s: %d VGPR, %d AGPR, %d SGPR, %d B local, %d waves/SIMD, %d B scratch%s\n",
          head, kernel[i], vgpr[i], agpr[i], sgpr[i], local_bytes[i], waves[i], scratch[i],
          (scratch[i] + spill[i] > 0 ? " SPILLS" : "")
      if (n == 0) print head " FAILED: the code object holds no kernel"
      exit n == 0
    }' "$work/log" || status=1
done
exit $status
