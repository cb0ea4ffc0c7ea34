#!/bin/sh
# Fails when the shared library exports what is not public, when a public header does not export
# what it declares, or when the library needs more than its packages say. The functions of the C API
# are those of tests/abi/c_symbols.txt: one that is gone, or means something else, is another
# CLATTN_ABI_VERSION.
# usage: tests/abi.sh LIBRARY
set -eu
export LC_ALL=C
cd "$(dirname "$0")/.."
library=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0

complain() {
  echo "abi: $*"
  status=1
}

# Names of templates begin with what they return.
nm -DC --defined-only "$library" | cut -d ' ' -f 3- |
  sed -E 's/^(bool|std::__cxx11::basic_string<char, [^()]*>) (clattn::[a-z_]+<)/\2/' |
  sort -u > "$work/exported"
[ -s "$work/exported" ] || complain "$library exports nothing"
grep '^clattn_' "$work/exported" > "$work/c_exported" || true
diff tests/abi/c_symbols.txt "$work/c_exported" ||
  complain "the C functions of tests/abi/c_symbols.txt (<) and of $library (>) differ"
grep -ohE 'clattn_[a-z0-9_]+\(' include/clattn/clattn*.h | tr -d '(' | sort -u > "$work/c_declared"
diff "$work/c_declared" "$work/c_exported" ||
  complain "the C functions of clattn*.h (<) and of $library (>) differ"
while read -r function; do
  grep -qE "EXPECT.*$function\(|^ *$function\(" tests/c_api/*.c ||
    complain "tests/c_api/ does not call $function"
done < "$work/c_exported"

# Functions, and what classes need across the border: exceptions are caught by their type.
grep -vE '^((vtable|typeinfo|typeinfo name) for |(non-)?virtual thunk to )?clattn(::|_)' \
  "$work/exported" > "$work/foreign" || true
grep -E '^([^(]* )?clattn::detail::' "$work/exported" >> "$work/foreign" || true
[ ! -s "$work/foreign" ] || complain "exported, but not public: $(cat "$work/foreign")"

grep -n '^namespace clattn {' include/clattn/*.hpp include/clattn/*/*.hpp > "$work/hidden" &&
  complain "without CLATTN_API, so that what it declares is hidden: $(cat "$work/hidden")"

readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort > "$work/needed"
grep -vE '^(libOpenCL|libfmt|libstdc\+\+|libm|libgcc_s|libc|ld-linux[-_a-z0-9]*)\.so' \
  "$work/needed" > "$work/further" &&
  complain "needs more than OpenCL, fmt and the C++ runtime: $(cat "$work/further")"
size=$(wc -c < "$library")
[ "$size" -le 10000000 ] || complain "$library has $size bytes, legal: <= 10 000 000"

[ $status != 0 ] || echo "abi: $(wc -l < "$work/exported") symbols are exported, all public"
exit $status
