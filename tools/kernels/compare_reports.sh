#!/bin/sh
# Compares what ptxas or NVIDIA's driver said of two commits' kernels: registers, spills and local
# memory of every configuration that both have, and of the driver's report the groups that a
# multiprocessor has room for; a line for each that differs, as OLD -> NEW, or is gone. Fails where
# one spills more. More registers alone are no fault: fewer groups may be resident, or none.
# usage: compare_reports.sh OLD/nvidia.report NEW/nvidia.report
#   where each report is left by: clattn_dump_kernels DIR && check_all.sh DIR nvidia
#   or, as driver.report, by nvidia_driver.py on a machine with a card
set -eu
[ $# = 2 ] || { sed -n 's/^# usage: /usage: /p' "$0" >&2; exit 2; }
awk '
  / registers, / {
    key = $2 " " $3
    sub(/:$/, "", $4)
    for (i = 5; i < NF; i++) {
      if ($(i + 1) ~ /^registers/) value["registers"] = $i
      if ($(i + 1) == "B" && $(i + 2) ~ /^local/) value["local"] = $i
      if ($(i + 1) == "B" && $(i + 2) ~ /^spilled/) value["spilled"] = $i
      if ($(i + 1) == "groups") value["groups"] = $i
    }
    key = key " " $4
    if (FNR == NR) {
      for (name in value) old[key, name] = value[name]
      known[key] = 1
      next
    }
    if (!(key in known)) { added++; next }
    both++
    delete known[key]
    changed = ""
    for (n = split("registers local spilled groups", names, " "); n > 0; n--) {
      name = names[n]
      if (old[key, name] + 0 == value[name] + 0) continue
      changed = sprintf("  %s %d -> %d", name, old[key, name], value[name]) changed
      if (name == "spilled" && value[name] + 0 > old[key, name] + 0) worse++
      if (name == "groups" && value[name] + 0 < old[key, name] + 0) fewer++
    }
    if (changed != "") { print key ":" changed; differ++ }
  }
  END {
    for (key in known) { print key ": gone"; gone++ }
    printf "%d configurations in both, %d differ, %d spill more, %d have room for fewer groups; "\
      "%d are gone, %d new\n", both, differ, worse, fewer, gone, added
    if (both == 0 || worse > 0) exit 1
  }' "$1" "$2"
