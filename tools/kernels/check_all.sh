#!/bin/sh
# Runs CHECKs over the kernels that the program clattn_dump_kernels wrote to DIR, several at a time.
# For every variant and representative configuration DIR holds
#   NAME.cl       the flattened source
#   NAME.options  its build options, on one line
#   NAME.kind     cpu, gpu or any: for which devices it is meant; amd, and chips that have its unit
# A CHECK is a script beside this one: lint, intel, amd or nvidia. What each compiler said about
# registers and spills is left in DIR/CHECK.report.
# usage: check_all.sh DIR CHECK...      CHIPS=few: of a variant only the first configuration goes to
#                                       every chip of a CHECK, the others to one of two in turn
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

# The first configurations of variants, from the list of files, or of the others every second.
part_of() {  # first, odd or even
  awk -F/ -v part="$1" '
    { variant = $NF; sub(/__d[0-9].*/, "", variant) }
    (seen[variant]++ ? (++others % 2 ? "odd" : "even") : "first") == part'
}

few_chips() {  # INTEL AMD NVIDIA: where nobody chose others
  export INTEL_DEVICES="${INTEL_DEVICES:-$1}" AMD_CHIPS="${AMD_CHIPS:-$2}"
  export NVIDIA_ARCHS="${NVIDIA_ARCHS:-$3}"
}

check_part() {  # CHECK PART: the files of the list
  case ${CHIPS:-all}-$2 in
    few-odd) few_chips skl gfx906 sm_80 ;;
    few-even) few_chips pvc gfx1100 sm_90 ;;
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
  for part in first odd even; do
    list=$(echo "$files" | part_of $part)  # an awk that fails ends the script here
    echo "$list" | (check_part "$check" $part) >> "$report" || verdict=FAILED
  done
  [ $verdict = passed ] || { status=1; grep 'FAILED' "$report" || cat "$report"; }
  spills=$(grep -c 'SPILLS' "$report" || true)
  echo "$check: $verdict, $(echo "$files" | wc -l) kernel files, $spills spilling builds," \
    "$(($(date +%s) - start)) s, details in $report"
  grep 'SPILLS' "$report" || true
done
exit $status
