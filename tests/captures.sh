#!/bin/sh
# Fails when a public call that takes a queue is missing from tests/captures.txt, so that no
# operation on device memory is added without a capture; when an entry there has no call, or names
# an operation that captures do not write or `clattn run` does not execute, or no test.
# usage: tests/captures.sh [FOLDER_OF_HEADERS]
set -eu
cd "$(dirname "$0")/.."
headers=${1:-include/clattn}
table=tests/captures.txt
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# "header name" of every public function with a cl_command_queue among its parameters.
for header in "$headers"/*.hpp "$headers"/compat/*.hpp; do
  awk '
    FNR == 1 { file = FILENAME; sub(/.*\//, "", file) }
    /^ *private:/ { hidden = 1 }
    /^ *public:|^(class|struct) |^ *};/ { hidden = 0; text = "" }
    hidden { next }
    { sub(/\/\/.*/, ""); text = text " " $0 }
    /[;{}]/ {
      parts = split(text, part, /[;{}]/)
      for (i = 1; i < parts; i++) {
        if (part[i] !~ /\([^)]*cl_command_queue/) continue
        name = part[i]
        sub(/ *\(.*/, "", name)
        sub(/.*[ *&:]/, "", name)
        print file " " name
      }
      text = part[parts]
    }' "$header"
done | sort -u > "$work/calls"
[ -s "$work/calls" ] ||
  echo "captures: $headers has no call that takes a queue" > "$work/complaints"

sed -n 's/^\([a-z_]*\.hpp [A-Za-z0-9_]*\): .*/\1/p' "$table" | sort > "$work/entries"
{
  comm -23 "$work/calls" "$work/entries" | sed "s|^|no capture in $table of |"
  comm -13 "$work/calls" "$work/entries" | sed 's/^/no header has /'
  sed -n 's/^[a-z_]*\.hpp [A-Za-z0-9_]*: \([a-z_]*\)$/\1/p' "$table" | sort -u |
    while read -r op; do
      grep -rqF "\"$op\"" src/capture src/kv_cache || echo "captures do not write $op"
      grep -qF "{\"$op\", run_" program/run/run.cpp ||
        echo "clattn run does not execute $op"
    done
  sed -n 's/^  \([A-Za-z]*\)\.\([A-Za-z0-9_]*\)$/\1, \2/p' "$table" | sort -u |
    while read -r test; do
      grep -rqE "^TEST(_[FP])?\($test\)" tests || echo "no test $test"
    done
} | sed 's/^/captures: /' >> "$work/complaints"
cat "$work/complaints"
[ ! -s "$work/complaints" ] || exit 1
echo "captures: $(wc -l < "$work/calls") public calls are captured or need not be"
