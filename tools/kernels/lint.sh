#!/bin/sh
# Strict front-end check of one dumped kernel file by two clang versions: all warnings, then no
# extension at all (so that fp16 arithmetic, doubles and sub-groups are errors), then 32-bit
# products that become 64-bit offsets.
# usage: lint.sh FILE.cl
set -eu
file=$1
name=$(basename "$file" .cl)
options=$(cat "${file%.cl}.options")
target=spir64-unknown-unknown
case $options in *-DCLA_REDUCE=1*) target=nvptx64-unknown-unknown ;; esac  # for inline PTX
language="-x cl -cl-std=CL1.2 --target=$target -Xclang -finclude-default-header"
strict="-Wall -Wextra -Wconversion -Wshadow -Wundef -Wdouble-promotion -Werror"
# What OpenCL C 1.2 has without asking; the front end lists it as extensions.
core=+cl_khr_byte_addressable_store,+cl_khr_global_int32_base_atomics
core=$core,+cl_khr_local_int32_base_atomics,+cl_khr_global_int32_extended_atomics
core=$core,+cl_khr_local_int32_extended_atomics
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0

run() {  # STEP COMMAND...
  step=$1
  shift
  if ! "$@" > "$log" 2>&1; then
    echo "lint $name FAILED ($step, $options)"
    sed 's/^/  FAILED: /' "$log" | head -8
    status=1
  fi
}

for clang in clang-15 clang-19; do
  # shellcheck disable=SC2086  # lists of flags
  run "$clang strict" $clang $language $strict -fsyntax-only $options "$file"
  # shellcheck disable=SC2086
  run "$clang without extensions" $clang $language -Xclang -cl-ext=-all,$core -Werror \
    -fsyntax-only $options "$file"
done
# shellcheck disable=SC2086
run "clang-tidy" clang-tidy --quiet --config='{}' --warnings-as-errors='*' \
  --checks=-*,bugprone-implicit-widening-of-multiplication-result,clang-analyzer-core* \
  "$file" -- $language $options
exit $status
