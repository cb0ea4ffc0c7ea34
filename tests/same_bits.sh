#!/bin/sh
# Fails unless all commands print the same, each a line of eight hexadecimal digits for every
# element of a step's output (examples/consumer/step.c).
# usage: tests/same_bits.sh COMMAND COMMAND...
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
elements=1024

first=$1
for command in "$@"; do
  sh -c "$command" > "$work/bits"
  lines=$(grep -cE '^[0-9a-f]{8}$' "$work/bits" || true)
  [ "$lines" = $elements ] || {
    echo "same_bits: $command printed $lines elements, not $elements"
    exit 1
  }
  [ -e "$work/first" ] || cp "$work/bits" "$work/first"
  cmp "$work/first" "$work/bits" || {
    echo "same_bits: $command gives other bits than $first"
    exit 1
  }
done
echo "same_bits: $# programs give the same bits"
