#!/bin/sh
# Compiles what a user's program may write, with a user's warnings as errors: every public header in
# one source, each struct with one field given and the others left out, the C headers as C. Below
# C++20 the first error says what is wrong.
# usage: CXX=g++ tests/user_program.sh
set -eu
export LC_ALL=C
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
warnings='-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Werror'

# NAME FIELD of every struct at the level of the namespace that derives from none and has no
# constructors, which stand before its fields.
# shellcheck disable=SC2016  # awk's
find include -name '*.hpp' | sort | xargs awk '
  /^template/ { generic = FNR }
  /^struct [A-Za-z]+ \{/ { name = generic == FNR - 1 ? "" : $2; next }
  /^\}/ { name = "" }
  /operator/ { next }
  name != "" && index($0, " " name "(") { name = "" }
  name != "" && /^  [A-Za-z]/ && !/^  (using|static|friend|struct|enum|template) / {
    line = $0
    sub(/ *(=|;|\{).*/, "", line)
    if (line ~ /\(/) next
    sub(/.*[ *]/, "", line)
    print name, line
    name = ""
  }
  END { print "AttentionConfig num_heads" }  # made of the rows of a table
  ' > "$work/structs"
[ "$(wc -l < "$work/structs")" -ge 60 ] || {
  echo "user_program: found $(wc -l < "$work/structs") structs"
  exit 1
}
{
  (cd include && find clattn -name '*.hpp' | sort | sed 's/.*/#include <&>/')
  echo 'void use_all();'
  echo 'void use_all() {'
  awk '{ printf "  [[maybe_unused]] const clattn::%s value%d = {.%s = {}};\n", $1, NR, $2 }' \
    "$work/structs"
  echo '}'
} > "$work/program.cpp"
(cd include && find clattn -name '*.h' | sort | sed 's/.*/#include <&>/') > "$work/program.c"
echo 'typedef int not_empty;' >> "$work/program.c"

for compiler in "${CXX:-c++}" g++ clang++; do
  command -v "$compiler" > /dev/null || continue
  echo "$compiler"
done | sort -u > "$work/compilers"
while read -r compiler; do
  # shellcheck disable=SC2086  # a list of options
  "$compiler" -std=c++20 $warnings -Iinclude -fsyntax-only "$work/program.cpp"
  # shellcheck disable=SC2086
  "$compiler" -x c -std=c99 $warnings -Iinclude -fsyntax-only "$work/program.c"
  if "$compiler" -std=c++17 -Iinclude -fsyntax-only "$work/program.cpp" 2> "$work/errors"; then
    echo "user_program: $compiler took C++17"
    exit 1
  fi
  grep -m 1 'error' "$work/errors" | grep -q 'C++20' || {
    echo "user_program: the first error below C++20 is another one:"
    grep -m 1 'error' "$work/errors"
    exit 1
  }
done < "$work/compilers"
echo "user_program: $(wc -l < "$work/structs") structs, all headers: $(xargs < "$work/compilers")"
