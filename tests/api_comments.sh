#!/bin/sh
# Fails when a public header declares something without a comment, by doxygen's warnings. Not asked
# for: copies, moves and comparisons, which do what their class says; enumerators; and what clattn.h
# says once for all structs and handles.
# usage: tests/api_comments.sh
set -eu
cd "$(dirname "$0")/.."
command -v doxygen > /dev/null || { echo "api_comments: needs doxygen"; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Doxygen looks only into what has a comment itself.
{
  echo '/// The library.'
  echo 'namespace clattn {}'
  for header in include/clattn/*.h; do
    echo "/// @file $(basename "$header")"
    echo '/// In C.'
  done
} > "$work/scopes.hpp"
doxygen - > "$work/out" 2> "$work/warnings" << TEXT
INCLUDE_PATH = include
INPUT = include/clattn $work/scopes.hpp
RECURSIVE = YES
FILE_PATTERNS = *.hpp *.h
OUTPUT_DIRECTORY = $work
GENERATE_HTML = NO
GENERATE_LATEX = NO
GENERATE_XML = YES
DISTRIBUTE_GROUP_DOC = YES
WARN_NO_PARAMDOC = NO
QUIET = YES
TEXT
grep -q 'name>clattn::Session<' "$work/xml/index.xml" || { cat "$work/warnings"; exit 1; }

implied='operator=|&&[a-z]*\) noexcept|\(const [A-Za-z]* &other\)|Member (struct_size|reserved) '
implied="$implied|_destroy\\(|Member (CL_TARGET_OPENCL_VERSION|CLATTN_C_API) "
implied="$implied|Member CLATTN_FIELD\\("
missing=$(grep -vE "$implied" "$work/warnings" | sed "s|^$PWD/||" | sort -u) || true
if [ -n "$missing" ]; then
  echo "$missing"
  echo "api_comments: the declarations above have no comment"
  exit 1
fi
echo "api_comments: what the public headers declare has comments"
