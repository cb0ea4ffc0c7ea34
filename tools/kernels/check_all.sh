#!/bin/sh
# Runs CHECKs over the kernels that the program clattn_dump_kernels wrote to DIR, several at a time.
# For every variant and representative configuration DIR holds
#   NAME.cl       the flattened source
#   NAME.options  its build options, on one line
#   NAME.kind     cpu, gpu or any: for which devices it is meant; amd, and chips that have its unit
# A CHECK is a script beside this one: lint, intel, amd or nvidia. What each compiler said about
# registers and spills is left in DIR/CHECK.report.
# usage: check_all.sh DIR CHECK...
# CHIPS=few: only the first configuration of a kernel's first variant goes to every chip of a CHECK.
# Of the others, one of two chips in turn gets the first of each variant, each configuration in one
# variant of the kernel, and a quarter of the rest.
set -eu
tools=$(cd "$(dirname "$0")" && pwd)
dir=${1:?usage: check_all.sh DIR CHECK...}
shift

chosen_for() {  # CHECK: the files that it is to see
  for file in "$dir"/*.cl; do
    [ -e "$file" ] || continue
    kind=$(cat "${file%.cl}.kind")
    options=$(cat "${file%.cl}.options")
    case $1/$kind/$options in
      lint/* | intel/*-cl-intel-*) ;;
      *-cl-intel-*) continue ;;   # on Intel's matrix units
      */cpu/*) continue ;;        # vectors and extensions of the CPU compiler
      amd/amd*) ;;
      */amd*) continue ;;         # built-ins of clang for those chips
      *-DCLA_PTX=2*) continue ;;  # sub-groups, which CI executes: docs/testing.md
      nvidia/*) ;;
      *-DCLA_PTX=1*) continue ;;  # inline PTX
    esac
    echo "$file"
  done
}

# Files of the list for every chip (all), for one of two chips (odd, even), or for none of them.
part_of() {  # all, odd or even
  awk -F/ -v part="$1" -v few="${CHIPS:-all}" '
    {
      variant = $NF
      sub(/__d[0-9].*/, "", variant)
      kernel = $NF
      sub(/__.*/, "", kernel)
      configuration = kernel substr($NF, length(variant) + 1)
      nth_of_variant = variants[variant]++
      nth_variant = configurations[configuration]++
      if (few == "all" || !kernels[kernel]++)
        is = "all"
      else if (!nth_of_variant || !nth_variant || (nth_variant + nth_of_variant) % 4 == 0)
        is = ++others % 2 ? "odd" : "even"
      else
        is = "none"
    }
    is == part'
}

few_chips() {  # INTEL AMD NVIDIA: where nobody chose others
  export INTEL_DEVICES="${INTEL_DEVICES:-$1}" AMD_CHIPS="${AMD_CHIPS:-$2}"
  export NVIDIA_ARCHS="${NVIDIA_ARCHS:-$3}"
}

check_part() {  # CHECK PART: the files of the list
  case $2 in
    odd) few_chips skl gfx906 sm_80 ;;
    even) few_chips pvc gfx1100 sm_90 ;;
  esac
  xargs -r -n 1 -P "${JOBS:-$(nproc)}" sh "$tools/$1.sh"
}

status=0
for check in "$@"; do
  start=$(date +%s)
  files=$(chosen_for "$check")
  if [ -z "$files" ]; then
    echo "$check: no kernel for it in $dir" >&2
    status=1
    continue
  fi
  verdict=passed
  report=$dir/$check.report
  : > "$report"
  compiled=0
  for part in all odd even; do
    list=$(echo "$files" | part_of $part)  # an awk that fails ends the script here
    [ -n "$list" ] || continue
    compiled=$((compiled + $(echo "$list" | wc -l)))
    echo "$list" | (check_part "$check" $part) >> "$report" || verdict=FAILED
  done
  [ $verdict = passed ] || { status=1; grep 'FAILED' "$report" || cat "$report"; }
  spills=$(grep -c 'SPILLS' "$report" || true)
  echo "$check: $verdict, $compiled of $(echo "$files" | wc -l) kernel files, $spills spilling" \
    "builds, $(($(date +%s) - start)) s, details in $report"
  grep 'SPILLS' "$report" || true
done
exit $status
