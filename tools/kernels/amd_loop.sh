#!/bin/sh
# Counts the instructions of one dumped kernel's loops that hold matrix instructions, by kind, for an
# AMD GPU: basic blocks with a product, as clang laid them out. Blocks of a slow path count, too.
# usage: AMD_BITCODE=DIR amd_loop.sh FILE.cl CHIP     DIR: from amd_bitcode.sh
set -eu
file=$1 chip=$2
options=$(cat "${file%.cl}.options")
# shellcheck disable=SC2086  # a list of options
clang-19 -x cl -cl-std=CL1.2 --target=amdgcn-amd-amdhsa -mcpu="$chip" -O3 -S -w \
  --rocm-device-lib-path="${AMD_BITCODE:?}" $options -o - "$file" |
  awk -v head="amd $chip $(basename "$file" .cl)" '
    function show() {
      if (products > 0)
        printf "%s %s: %d products, %d vector, %d local, %d global, %d scratch, %d scalar\n", head,
          block, products, vector, shared, global_, scratch, scalar
      products = vector = shared = global_ = scratch = scalar = 0
    }
    /^\.LBB|^[a-z_]*:/ { show(); block = $1; sub(/:.*/, "", block) }
    /^\tv_(mfma|wmma)/ { ++products; next }
    /^\tds_/ { ++shared; next }
    /^\tscratch_/ { ++scratch; next }
    /^\t(global|flat|buffer)_/ { ++global_; next }
    /^\tv_/ { ++vector; next }
    /^\ts_/ { ++scalar }
    END { show() }'
