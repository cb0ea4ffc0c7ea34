#!/bin/sh
# Fails when a document says what the sources do not: the README's program, the table of environment
# variables, links between files.
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

for page in README.md docs/*.md; do
  # shellcheck disable=SC2013  # links have no blanks
  for link in $(grep -o '](\([^)]*\))' "$page" | sed 's/^](//; s/)$//; s/#.*//'); do
    case $link in http*) continue ;; esac
    [ -e "$(dirname "$page")/$link" ] || complain "$page: broken link $link"
  done
done

[ $status != 0 ] || echo "docs: README, variables and links agree with the sources"
exit $status
