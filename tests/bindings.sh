#!/bin/sh
# Fails when a public function of C++ (compat/ aside) has no row in docs/bindings.md, a row has no
# function, a cell of C names what the library does not export, a function of C is in no row, or a
# cell of Python says nothing (python/tests/test_bindings.py compares what it says).
# What is not asked for: destructors, operators, and what is private.
# usage: tests/bindings.sh
set -eu
export LC_ALL=C
cd "$(dirname "$0")/.."
command -v doxygen > /dev/null || { echo "bindings: needs doxygen"; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0

complain() {
  echo "bindings: $*"
  status=1
}

printf '/// The library.\nnamespace clattn {}\n' > "$work/scope.hpp" # doxygen looks into no other
doxygen - > "$work/out" 2>&1 << TEXT
INPUT = include/clattn $work/scope.hpp
FILE_PATTERNS = *.hpp
OUTPUT_DIRECTORY = $work
GENERATE_HTML = NO
GENERATE_LATEX = NO
GENERATE_XML = YES
QUIET = YES
TEXT
for page in "$work"/xml/class*.xml "$work"/xml/struct*.xml "$work"/xml/namespaceclattn.xml; do
  awk '
    /<compoundname>/ { scope = $0; gsub(/.*<compoundname>(clattn(::)?)?|<.*/, "", scope) }
    /<memberdef / { wanted = /kind="function"/ && /prot="public"/ }
    wanted && /^ *<name>/ {
      wanted = 0
      name = $0
      gsub(/.*<name>|<\/name>.*/, "", name)
      if (name ~ /^(~|operator)/) next
      if (scope ~ "(^|:)" name "$") print scope  # a constructor
      else print (scope == "" ? "" : scope "::") name
    }' "$page"
done | sort -u > "$work/functions"
grep -qx 'Session::attend' "$work/functions" || { cat "$work/out"; exit 1; }

# Rows of three cells: C++, C, Python. The last table names functions of C that C++ has not.
# shellcheck disable=SC2016  # Markdown's backticks
sed -n 's/^| `\([A-Za-z0-9_:]*\)` | \([^|]*\) |.*/\1 \2/p' docs/bindings.md > "$work/rows"
cut -d ' ' -f 1 "$work/rows" | grep -v '^clattn_' | sort > "$work/named"
uniq -d "$work/named" > "$work/twice"
[ ! -s "$work/twice" ] || complain "docs/bindings.md has two rows of: $(cat "$work/twice")"
diff "$work/functions" "$work/named" > "$work/difference" || {
  complain "functions of include/clattn/*.hpp (<) and rows of docs/bindings.md (>) differ:"
  grep '^[<>]' "$work/difference" || true
}
# shellcheck disable=SC2016
grep -vE '^[^ ]+ (`clattn_[a-z0-9_]+`(, `clattn_[a-z0-9_]+`)*|- .*) *$' \
  "$work/rows" > "$work/wrong" &&
  complain "the cell of C is neither names nor '- reason': $(cat "$work/wrong")"
# shellcheck disable=SC2016
grep -E '^[|] `[A-Z0-9_a-z:]+` [|]' docs/bindings.md | grep -vE '^[|] `clattn_' |
  grep -vE '[|] (yes|`[^|]*`|- [^|]*) [|]$' > "$work/wrong" &&
  complain "the cell of Python is neither 'yes' nor names nor '- reason': $(cat "$work/wrong")"
# shellcheck disable=SC2016
{
  grep -o '`clattn_[a-z0-9_]*`' "$work/rows" | tr -d '`'
  sed -n 's/^\(clattn_[a-z0-9_]*\) .*/\1/p' "$work/rows"
  grep '_destroy$' tests/abi/c_symbols.txt
} | sort -u > "$work/c_named"
diff tests/abi/c_symbols.txt "$work/c_named" > "$work/difference" || {
  complain "functions of C (<) and those in docs/bindings.md (>) differ:"
  grep '^[<>]' "$work/difference" || true
}

[ $status != 0 ] ||
  echo "bindings: $(wc -l < "$work/functions") functions of C++ are elsewhere or have a reason"
exit $status
