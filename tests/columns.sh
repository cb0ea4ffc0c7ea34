#!/bin/sh
# Fails when a text file that git tracks has a line of more than 100 columns.
# usage: tests/columns.sh
set -eu
export LC_ALL=C.UTF-8  # columns are characters, not bytes
cd "$(dirname "$0")/.."

# Data: tables that programs write or read a row a line, and what has a form of its own.
data='^bench/.*\.txt$|\.json$|\.tsv$|\.npy$|LICENSE'

tracked() { git ls-files 2> /dev/null || find .ci .github [!.]* -type f ! -path 'build*'; }

# awk counts bytes in some versions, grep counts the locale's characters in all.
long=$(tracked | grep -vE "$data" | xargs grep -nIE '^.{101,}' | cut -d : -f 1,2) || true
if [ -n "$long" ]; then
  echo "$long" | sed 's/$/: more than 100 columns/'
  exit 1
fi
echo "columns: no line is longer than 100 columns"
