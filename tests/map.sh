#!/bin/sh
# Holds docs/vllm-map.md to its tests and to the sources: every row has an entry in
# tests/map_tests.txt and every entry a row, in the same order; every test named there exists; what
# is "absent" stands in no source of the library; what CLAttn's column names stands in one, and so
# do the errors that it calls the same; every note is referred to.
# usage: tests/map.sh [MAP [ENTRIES]]
set -eu
cd "$(dirname "$0")/.."
map=${1:-docs/vllm-map.md}
entries=${2:-tests/map_tests.txt}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# What the two pages say, one kind a file of $work; their own mistakes to the output.
read_map() {
  awk -v work="$work" '
    /^## / { section = $2; sub(/\..*/, "", section) }
    /^[0-9]+\. / { print section " note " $1 + 0 > (work "/notes") }
    /^\| (vLLM|defect|---)/ || !/^\| / { next }
    {
      if (split($0, cell, / *\| */) != 5) print "not three columns: " $0
      print section ": " cell[2] > (work "/rows")
      print cell[3] > (work "/ours")
      if (cell[3] ~ /^the same names?/) print cell[2] > (work "/ours")
      if (cell[3] ~ /^the same (text|words)/ && split(cell[2], text, "`") > 2) {
        sub(/ *\.\..*/, "", text[2])
        print text[2] > (work "/texts")
      }
      if (cell[4] ~ /^note [0-9]+$/) print section " " cell[4] > (work "/references")
    }' "$map"
}
read_entries() {
  awk -v work="$work" '
    /^#/ || /^$/ { next }
    /^A[0-9]+$/ { section = $0; next }
    /^  absent / { sub(/^  absent /, ""); print > (work "/absent"); tests++; next }
    /^  / { print $1 > (work "/cited"); tests++; next }
    {
      if (row != "" && !tests) print "no test for " row
      row = section ": " $0
      tests = 0
      print row > (work "/entries")
    }
    END { if (!tests) print "no test for " row }' "$entries"
}

compare_rows() {
  diff "$work/rows" "$work/entries" | sed -n 's/^</row without an entry (or elsewhere):/p
    s/^>/entry without a row (or elsewhere):/p'
  sort "$work/rows" | uniq -d | sed 's/^/two rows /'
  sort -u "$work/notes" > "$work/numbered"
  sort -u "$work/references" | comm -3 "$work/numbered" - |
    sed 's/^[[:space:]]*/note or reference alone: /'
}

# Tests are TEST*(Suite, Name).
find_tests() {
  grep -rhE '^ *(TEST|TEST_[FP]|TYPED_TEST)\(' tests |
    sed 's/^ *[A-Z_]*(\([^,]*\), *\([^)]*\)).*/\1.\2/' | sort -u > "$work/tests"
  sort -u "$work/cited" | comm -23 - "$work/tests" | sed 's/^/no test /'
}

# shellcheck disable=SC2013,SC2016  # Markdown's backticks; names have no blanks
find_names() {
  while read -r words; do
    grep -rlF -- "$words" include src kernels_cl | sed "s/^/\"$words\" is absent, but stands in /"
  done < "$work/absent"
  while read -r words; do
    grep -rqF -- "$words" src || echo "no error of the library says \"$words\""
  done < "$work/texts"
  grep -rhoE '[A-Za-z_][A-Za-z0-9_]*' include src | sort -u > "$work/words"
  grep -oE '`[^`]*`' "$work/ours" | sed -E 's/`[a-z0-9_/]+\.(hpp|h|cpp)`//' |
    grep -oE '[A-Za-z_][A-Za-z0-9_]*' | sort -u | comm -23 - "$work/words" |
    sed 's/^/no source of the library has /'
  for file in $(grep -oE '`[a-z0-9_/]+\.(hpp|h|cpp)`' "$map" | tr -d '`' | sort -u); do
    [ -e "$file" ] || [ -e "include/clattn/$file" ] || echo "no file $file"
  done
}

{
  read_map
  read_entries
  compare_rows
  find_tests
  find_names
} > "$work/complaints"
sed 's/^/map: /' "$work/complaints"
[ ! -s "$work/complaints" ] || exit 1
echo "map: $(wc -l < "$work/rows") rows agree with their tests and the sources"
