#!/bin/sh
# Fails when a function of the library has more than 80 lines. It relies on clang-format: a function
# ends with the first line that is a bare } as far indented as its first line. Classes end with };
# and namespaces with a comment.
# usage: tests/function_length.sh [FILE...]
set -eu
cd "$(dirname "$0")/.."

# shellcheck disable=SC2046  # file names have no blanks
[ $# -gt 0 ] || set -- $(find include src -name '*.[ch]pp' | sort)
awk -v most=80 '
  FNR == 1 { split("", first) }
  /^ *$/ || /^#/ { next }
  { match($0, /^ */) }
  /^ *}$/ {
    ++functions
    lines = FNR - first[RLENGTH] + 1
    if (lines > most) {
      printf "%s:%d: a function of %d lines, legal: at most %d\n",
        FILENAME, first[RLENGTH], lines, most
      bad = 1
    } else if (lines > longest) {
      longest = lines
    }
    next
  }
  { first[RLENGTH] = FNR }
  END {
    if (functions == 0) { print "function_length: no function found"; exit 1 }
    if (!bad) printf "function_length: the longest function has %d lines\n", longest
    exit bad
  }
' "$@"
