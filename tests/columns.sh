#!/bin/sh
# Fails when a text file that git tracks has a line of more than 100 columns.
# usage: tests/columns.sh
set -eu
export LC_ALL=C.UTF-8  # columns are characters, not bytes
cd "$(dirname "$0")/.."

# Data: tables that programs write or read a row a line, and what has a form of its own.
data='^bench/.*\.txt$|\.json$|\.npy$|LICENSE'
# Pages that are still to be rewritten; no other may join them.
pages='docs/vllm-map.md docs/architecture.md docs/cases.md docs/environment.md
kernels_cl/tile/CONTRACT.md'

tracked() { git ls-files 2> /dev/null || find .ci .github [!.]* -type f ! -path 'build*'; }

# awk counts bytes in some versions, grep counts the locale's characters in all.
# shellcheck disable=SC2086  # file names of the tree have no blanks
long=$(tracked | grep -vE "$data" | grep -vxF "$(printf '%s\n' $pages)" |
  xargs grep -nIE '^.{101,}' | cut -d : -f 1,2) || true
if [ -n "$long" ]; then
  echo "$long" | sed 's/$/: more than 100 columns/'
  exit 1
fi
for page in $pages; do
  grep -qE '^.{101,}' "$page" || {
    echo "tests/columns.sh: $page needs no exception any more: take it off the list"
    exit 1
  }
done
echo "columns: no line is longer than 100 columns"
