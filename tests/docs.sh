#!/bin/sh
# Fails when a document says what the sources do not: programs of the README and of docs/howto.md,
# the table of environment variables, the version, links between files, docs/vllm-map.tsv
# (tests/map.sh), the tables and the picture that are made from bench/results/; and where a table of
# results has no report.
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

same_program() {  # PAGE HEADING FILE: the page's C++ under that heading is the file
  # shellcheck disable=SC2016  # Markdown's backticks
  sed -n "/^## $2\$/,/^## /p" "$1" | sed -n '/^```cpp$/,/^```$/{/^```/d;p;}' > "$work/program.cpp"
  cmp -s "$work/program.cpp" "$3" || {
    complain "$1: the program under \"$2\" is not $3:"
    diff "$work/program.cpp" "$3" || true
  }
}
same_program README.md 'From C++' examples/first_program.cpp
same_program docs/howto.md 'Run one step by hand' examples/one_step.cpp

cat src/base/environment.* | grep -o 'CLATTN_[A-Z_]*' | sort -u > "$work/read"
# shellcheck disable=SC2016
sed -n 's/^| `\(CLATTN_[A-Z_]*\)`.*/\1/p' docs/environment.md | sort -u > "$work/documented"
[ -s "$work/read" ] || complain "found no variable in src/base/environment.*"
cmp -s "$work/read" "$work/documented" || {
  complain "variables in src/base/environment.* (<) and in docs/environment.md (>) differ:"
  diff "$work/read" "$work/documented" || true
}

# The version is in include/clattn/version.h alone. What repeats it, because it cannot read that
# file or shows a user what to write, has the same.
same_version() {  # VERSION EXPRESSION FILE...: sed -nE EXPRESSION prints of each file this version
  expected=$1
  expression=$2
  shift 2
  for file in "$@"; do
    said=$(sed -nE "$expression" "$file" | sort -u | paste -sd ' ' -)
    [ "$said" = "$expected" ] ||
      complain "$file: version '$said', by include/clattn/version.h it is $expected"
  done
}
version=$(sed -n 's/^#define CLATTN_VERSION_[MP][A-Z]* //p' include/clattn/version.h |
  paste -sd . -)
minor=${version%.*}
abi=${version%%.*}
[ "$abi" != 0 ] || abi=$minor
same_version "$version" 's/^ *"?version"? *[:=] *"?([0-9.]+).*/\1/p
  s/.*"clattn==([0-9.]+)".*/\1/p' CITATION.cff packaging/vcpkg/vcpkg.json python/pyproject.toml \
  integrations/*/pyproject.toml
same_version "$version" '/^## /{s/^## ([0-9.]+).*/\1/p;q;}' CHANGELOG.md
# shellcheck disable=SC2046  # names have no blanks
same_version "$version" 's/.*"([0-9]+\.[0-9]+\.[0-9]+)".*/\1/p' \
  $(grep -rlE '"[0-9]+\.[0-9]+\.[0-9]+"' include/clattn)
same_version "$minor" 's/.*find_package\(clattn ([0-9.]+).*/\1/p' README.md docs/howto.md \
  examples/consumer/CMakeLists.txt
same_version "$abi" 's/.*libclattn(\.so\.)?([0-9]+(\.[0-9]+)*).*/\2/p' docs/howto.md \
  docs/architecture.md

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
  python3 bench/chart.py --check || status=1
else
  echo "docs: no python3 here, so tables of results and their picture are not compared with reports"
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

[ $status != 0 ] || echo "docs: README, variables, links and the map agree with the sources"
exit $status
