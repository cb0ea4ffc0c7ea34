#!/bin/sh
# Fails when a block of C++ or C in the documents does not compile. A block with an #include is a
# source file of its own. One without is the body of a function, in which the names of
# tests/snippets_prelude.hpp, in C snippets_prelude.h, are declared.
# usage: tests/snippets.sh [FOLDER]: leaves the sources in FOLDER
set -eu
cd "$(dirname "$0")/.."
work=${1:-$(mktemp -d)}
[ $# -gt 0 ] || trap 'rm -rf "$work"' EXIT
mkdir -p "$work"

awk -v work="$work" '
  function finish() {
    name = FILENAME
    gsub(/[^A-Za-z0-9]/, "_", name)
    source = work "/" name "_" first "." language
    place = "#line " first " \"" FILENAME "\"\n"
    if (block !~ /(^|\n)#include/) {
      prelude = "tests/snippets_prelude.h" (language == "cpp" ? "pp" : "")
      parameters = language == "cpp" ? "()" : "(void)"
      place = "#include \"" prelude "\"\nvoid fragment" parameters " {\n" place
      block = block "}\n"
    }
    printf "%s", place block > source
    close(source)
  }
  FNR == 1 && inside { print "snippets: a block of code does not end" > "/dev/stderr"; exit 1 }
  /^ *```(cpp|c)$/ {
    inside = 1
    language = /cpp/ ? "cpp" : "c"
    first = FNR + 1
    block = ""
    next
  }
  inside && /^ *```$/ { inside = 0; finish(); next }
  inside { block = block $0 "\n" }
  END { if (inside) exit 1 }' ./*.md docs/*.md kernels_cl/*.md kernels_cl/*/*.md

status=0
count=0
compile() {  # LANGUAGE COMPILER: several sources at a time
  sources=$(find "$work" -name "*.$1" | sort)
  [ -n "$sources" ] || { echo "snippets: the documents hold no block of $1"; exit 1; }
  # shellcheck disable=SC2086  # a list of words
  echo "$sources" | xargs -d '\n' -n 1 -P "$(nproc)" $2 -fsyntax-only -Wall -Wextra -Werror \
    -Wno-unused -Iinclude -I. || status=1
  count=$((count + $(echo "$sources" | wc -l)))
}
compile c "${CC:-cc} -std=c99 -pedantic"
compile cpp "${CXX:-c++} -std=c++20"
[ $status != 0 ] || echo "snippets: $count blocks of C++ and C in the documents compile"
exit $status
