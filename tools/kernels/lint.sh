#!/bin/sh
# Strict front-end check of one dumped kernel file by two clang versions: all warnings, then no
# extension at all (so that fp16 arithmetic, doubles and sub-groups are errors), then clang-tidy.
# usage: lint.sh FILE.cl
set -eu
file=$1
name=$(basename "$file" .cl)
options=$(cat "${file%.cl}.options")
on_dpas=false
case $options in
  *-cl-intel-256-GRF-per-thread*) on_dpas=true ;;  # Intel's alone
esac
options=$(echo "$options" | sed 's/-cl-intel-256-GRF-per-thread//')
case $options in
  *-DCLA_PTX=1*) tidy=false target="nvptx64-unknown-unknown -fgnu-keywords" ;;
  *-DCLA_PTX=2*) tidy=false target=spir64-unknown-unknown ;;
  *-DCLA_DOT=1*) tidy=true target="x86_64-unknown-linux-gnu -mavx512f -mavx512bw" ;;
  *) tidy=true target=spir64-unknown-unknown ;;
esac
case $(cat "${file%.cl}.kind") in
  "amd gfx9"*) tidy=false target="amdgcn-amd-amdhsa -mcpu=gfx90a -nogpulib" ;;
  amd*) tidy=false target="amdgcn-amd-amdhsa -mcpu=gfx1201 -nogpulib" ;;
esac
if grep -q tdpbf16ps "$file"; then
  target="x86_64-unknown-linux-gnu -mavx512f -mavx512bw"
fi
language="-x cl -cl-std=CL1.2 --target=$target -Xclang -finclude-default-header"
reserved="-include $(dirname "$0")/reserved.h"
# Unused parameters and helpers: every kernel has its family's argument list and includes whole
# files.
strict="-Wall -Wextra -Wno-unused-parameter -Wno-unused-function -Wshadow -Wundef
  -Wdouble-promotion -Werror"
# What OpenCL C 1.2 has without asking; the front end lists it as extensions.
core=+cl_khr_byte_addressable_store,+cl_khr_global_int32_base_atomics
core=$core,+cl_khr_local_int32_base_atomics,+cl_khr_global_int32_extended_atomics
core=$core,+cl_khr_local_int32_extended_atomics
case $on_dpas$options in
  *-DCLA_PTX=2* | true*)  # a probe asks for them
    core=$core,+cl_khr_subgroups,+cl_intel_subgroups
    language="$language -include $(dirname "$0")/sub_groups.h"
    ;;
esac
compilers="clang-15 clang-19"
case $target in
  amdgcn*)  # a matrix unit's built-ins, which clang 15 does not know, take elements of this type
    core=$core,+cl_khr_fp16
    compilers="clang-19"
    ;;
esac
if $on_dpas; then
  tidy=false
  language="$language -include $(dirname "$0")/intel_built_ins.h"
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0

failed() {  # STEP
  echo "lint $name FAILED ($1, $options)"
  sed 's/^/  FAILED: /' "$log" | head -8
  status=1
}

# clang 19 takes a vector's ?: for a conversion to bool, so conversions are clang 15's.
for clang in $compilers; do
  conversion=
  [ "$clang" = clang-19 ] || conversion=-Wconversion
  # shellcheck disable=SC2086  # lists of flags
  $clang $conversion $language $reserved $strict -fsyntax-only $options "$file" > "$log" 2>&1 ||
    failed "$clang strict"
  # shellcheck disable=SC2086
  $clang $language -Xclang -cl-ext=-all,$core -Werror -fsyntax-only $options "$file" \
    > "$log" 2>&1 || failed "$clang without extensions"
done

# A 32-bit product that becomes a 64-bit offset overflows in a large cache. One that indexes an
# array directly is mostly a local array's, and those are small: not counted. Kernels by sub-groups
# are skipped, because their functions get local arrays by pointers, and so is inline PTX, which
# this version cannot parse.
if $tidy; then
  # shellcheck disable=SC2086
  clang-tidy --quiet --config='{}' \
    --checks=-*,bugprone-implicit-widening-of-multiplication-result \
    "$file" -- $language $options > "$log" 2>&1 || [ $? = 1 ] || failed "no clang-tidy"
  if grep -q -E 'error:|performing an implicit widening' "$log"; then
    failed clang-tidy
  fi
fi
exit $status
