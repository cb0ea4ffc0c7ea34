#!/bin/sh
# Fails when a document says what the sources do not: the README's program, the table of environment
# variables, links between files, docs/vllm-map.md (tests/map.sh), the tables that are made from
# bench/results/, and where others may stand.
# usage: tests/docs.sh
set -eu
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0

complain() {
  echo "docs: $*"
  status=1
}

# shellcheck disable=SC2016  # Markdown's backticks
sed -n '/^```cpp$/,/^```$/{/^```/d;p;}' README.md > "$work/readme.cpp"
cmp -s "$work/readme.cpp" examples/first_program.cpp || {
  complain "README.md's program is not examples/first_program.cpp:"
  diff "$work/readme.cpp" examples/first_program.cpp || true
}

cat src/base/environment.* | grep -o 'CLATTN_[A-Z_]*' | sort -u > "$work/read"
# shellcheck disable=SC2016
sed -n 's/^| `\(CLATTN_[A-Z_]*\)`.*/\1/p' docs/environment.md | sort -u > "$work/documented"
[ -s "$work/read" ] || complain "found no variable in src/base/environment.*"
cmp -s "$work/read" "$work/documented" || {
  complain "variables in src/base/environment.* (<) and in docs/environment.md (>) differ:"
  diff "$work/read" "$work/documented" || true
}

for page in ./*.md docs/*.md kernels_cl/*.md kernels_cl/*/*.md tools/*/README.md python/*.md \
  integrations/*/*.md; do
  # shellcheck disable=SC2013,SC2016  # links have no blanks; Markdown's backticks
  for link in $(sed '/^```/,/^```$/d' "$page" | grep -o '](\([^)]*\))' |
    sed 's/^](//; s/)$//; s/#.*//'); do
    case $link in http*) continue ;; esac
    [ -e "$(dirname "$page")/$link" ] || complain "$page: broken link $link"
  done
done

sh tests/map.sh || status=1

if command -v python3 > /dev/null; then
  python3 bench/results_tables.py --check || status=1
else
  echo "docs: no python3 here, so the tables of docs/results.md are not compared with their reports"
fi

# Tables of results are generated from reports, or the heading says that no report is kept.
typed_tables() {
  awk '/^<!-- (tables|rows) of bench/ { generated = 1 }
    /^<!-- end of the (tables|rows)/ { generated = 0 }
    /^## / { all_typed = typed = /not kept/ } /^### / { typed = all_typed || /not kept/ }
    /^\|/ && !generated && !typed' "$@"
}
sed -n '/^## How fast/,/^## Where/p' README.md > "$work/readme_figures"
[ -s "$work/readme_figures" ] || complain "README.md: no part 'How fast' in front of 'Where to ...'"
typed_tables docs/results.md "$work/readme_figures" > "$work/typed"
[ ! -s "$work/typed" ] || {
  complain "docs/results.md, README.md: rows without a report (bench/results/README.md):"
  cat "$work/typed"
}

# clattn.hpp brings what an engine needs: 12 headers of ours at most.
echo clattn/clattn.hpp > "$work/reached"
while sed 's/^/include\//' "$work/reached" | xargs grep -ohE '<clattn/[^>]+' | tr -d '<' |
    sort -u - "$work/reached" > "$work/further" && ! cmp -s "$work/reached" "$work/further"; do
  mv "$work/further" "$work/reached"
done
headers=$(($(wc -l < "$work/reached") - 1))
[ "$headers" -le 12 ] || complain "include/clattn/clattn.hpp reaches $headers headers, legal: <= 12"

[ $status != 0 ] || echo "docs: README, variables, links and the map agree with the sources"
exit $status
