#!/bin/sh
# Checks the recipes of package managers as far as that goes without them: syntax and dependencies.
# Their version is compared by tests/docs.sh.
# usage: tests/recipes.sh
set -eu
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0

complain() {
  echo "recipes: $*"
  status=1
}

# CMake reads a whole file before it runs the first line.
{ echo 'return()'; cat packaging/vcpkg/portfile.cmake; } > "$work/portfile.cmake"
cmake -P "$work/portfile.cmake" || complain "packaging/vcpkg/portfile.cmake is no CMake"
python3 -m json.tool packaging/vcpkg/vcpkg.json > "$work/json" ||
  complain "packaging/vcpkg/vcpkg.json is no JSON"
ruby -c packaging/homebrew/clattn.rb > "$work/ruby" ||
  complain "packaging/homebrew/clattn.rb is no Ruby"

for dependency in fmt opencl xxhash; do
  grep -qF "\"$dependency\"" "$work/json" || complain "vcpkg.json does not depend on $dependency"
  grep -q "depends_on \"$dependency" packaging/homebrew/clattn.rb ||
    complain "clattn.rb does not depend on $dependency"
done

[ $status != 0 ] || echo "recipes: vcpkg's and Homebrew's are sound"
exit $status
