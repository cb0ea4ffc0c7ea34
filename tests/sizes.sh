#!/bin/sh
# Fails when a part of the library becomes larger than a reader can hold: more than 25 files in a
# folder of src/ or program/, more than 400 lines in a public header, more than 12 headers or 46
# types in what clattn.hpp brings, which Session belongs to; and when a public header names the
# library's own namespace.
# usage: tests/sizes.sh
set -eu
export LC_ALL=C
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0

complain() {
  echo "sizes: $*"
  status=1
}

find src program -type f | sed 's|/[^/]*$||' | sort | uniq -c > "$work/folders"
for room in src program; do
  grep -q " $room/" "$work/folders" || complain "found no folder of $room/"
done
while read -r files folder; do
  [ "$files" -le 25 ] || complain "$folder has $files files, legal: <= 25"
done < "$work/folders"

find include -type f | sort | xargs wc -l | grep -v ' total$' > "$work/headers"
while read -r lines header; do
  [ "$lines" -le 400 ] || complain "$header has $lines lines, legal: <= 400"
done < "$work/headers"
grep -rnE 'detail::|namespace detail' include > "$work/own" && complain "$(cat "$work/own")"

echo clattn/clattn.hpp > "$work/reached"
while sed 's/^/include\//' "$work/reached" | xargs grep -ohE '<clattn/[^>]+[.]h(pp)?' | tr -d '<' |
    sort -u - "$work/reached" > "$work/further" && ! cmp -s "$work/reached" "$work/further"; do
  mv "$work/further" "$work/reached"
done
headers=$(($(wc -l < "$work/reached") - 1))
[ "$headers" -le 12 ] || complain "clattn.hpp brings $headers headers, legal: <= 12"
sed 's/^/include\//' "$work/reached" |
  xargs grep -hE '^(struct|class|enum class) [^;]*\{' > "$work/types"
types=$(wc -l < "$work/types")
[ "$types" -le 46 ] || complain "clattn.hpp brings $types types, legal: <= 46"
grep -q '^class Session {' "$work/types" || complain "clattn.hpp does not bring Session"

[ $status != 0 ] || echo "sizes: clattn.hpp brings $headers headers with $types types"
exit $status
