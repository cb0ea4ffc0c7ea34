#!/bin/sh
# Compares docs/vllm-map.tsv with its tests and the sources, and its page with it: no row is there
# twice; every row has tests, which exist; what is "absent" is in no source, in capitals or not;
# what CLAttn's column names is in one, and so are the errors that it calls the same; files exist.
# usage: tests/map.sh
set -eu
cd "$(dirname "$0")/.."
map=docs/vllm-map.tsv
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# What the rows say, one kind a file of $work; their own mistakes to the output.
read_map() {
  touch "$work/ours" "$work/texts" "$work/absent" "$work/cited"
  awk -F '\t' -v work="$work" '
    NR == 1 { next }
    NF != 5 { print "not five columns: " $0 }
    { print $1 ": " $2 > (work "/rows") }
    { print $3 > (work "/ours") }
    $3 ~ /^the same names?/ { print $2 > (work "/ours") }
    $3 ~ /^the same (text|words)/ && split($2, text, "`") > 2 {
      sub(/ *\.\..*/, "", text[2])
      print text[2] > (work "/texts")
    }
    $5 ~ /^ *$/ { print "no test for " $1 ": " $2 }
    sub(/^absent /, "", $5) { print $5 > (work "/absent"); next }
    { for (i = split($5, tests, / +/); i > 0; i--) print tests[i] > (work "/cited") }' "$map"
  sort "$work/rows" | uniq -d | sed 's/^/two rows /'
}

# Tests are TEST*(Suite, Name).
find_tests() {
  grep -rhE '^ *(TEST|TEST_[FP]|TYPED_TEST)\(' tests |
    sed 's/^ *[A-Z_]*(\([^,]*\), *\([^)]*\)).*/\1.\2/' | sort -u > "$work/tests"
  sort -u "$work/cited" | comm -23 - "$work/tests" | sed 's/^/no test /'
}

# shellcheck disable=SC2016  # Markdown's backticks
find_names() {
  while read -r words; do
    grep -rliF -- "$words" include src kernels_cl program |
      sed "s/^/\"$words\" is absent, but stands in /"
  done < "$work/absent"
  while read -r words; do
    grep -rqF -- "$words" src || echo "no error of the library says \"$words\""
  done < "$work/texts"
  grep -rhoE '[A-Za-z_][A-Za-z0-9_]*' include src | sort -u > "$work/words"
  grep -oE '`[^`]*`' "$work/ours" | sed -E 's/`[a-z0-9_/]+\.(hpp|h|cpp)`//' |
    grep -oE '[A-Za-z_][A-Za-z0-9_]*' | sort -u | comm -23 - "$work/words" |
    sed 's/^/no source of the library has /'
  grep -ohE '`[a-z0-9_/]+\.(hpp|h|cpp)`' "$map" docs/vllm-map.md | tr -d '`' | sort -u |
    while read -r file; do
      [ -e "$file" ] || [ -e "include/clattn/$file" ] || echo "no file $file"
    done
}

{
  read_map
  find_tests
  find_names
  if command -v python3 > /dev/null; then
    python3 tools/vllm_map.py --check 2>&1 || true
  else
    echo "map: no python3 here, so the page is not compared with the table" >&2
  fi
} > "$work/complaints"
sed 's/^/map: /' "$work/complaints"
[ ! -s "$work/complaints" ] || exit 1
echo "map: $(wc -l < "$work/rows") rows agree with their tests and the sources"
