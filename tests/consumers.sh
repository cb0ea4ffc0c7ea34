#!/bin/sh
# Builds programs outside of the tree against CLAttn, shared and static, by find_package and by
# pkg-config, and compares the bits of a step. The shared library is also found in its build.
# tests/howto.sh tests add_subdirectory.
# usage: tests/consumers.sh BUILD FOLDER STATIC: BUILD holds the shared library, STATIC is where the
# static one is installed
set -eu
cd "$(dirname "$0")/.."
build=$1
rm -rf "$2"
mkdir -p "$2"
work=$(cd "$2" && pwd)
static=$(cd "$3" && pwd)

consumer() {  # NAME ARGUMENT...
  name=$1
  shift
  cmake -G Ninja -S examples/consumer -B "$work/$name" "$@" > "$work/$name.log"
  cmake --build "$work/$name" >> "$work/$name.log" || { cat "$work/$name.log"; return 1; }
  "$work/$name/first_program"
}
# The flags that pkg-config names are words.
pkg_config() {  # NAME PREFIX FLAG...
  name=$1
  prefix=$2
  shift 2
  # shellcheck disable=SC2046
  cc -std=c99 -pedantic -Wall -Wextra -Werror examples/consumer/step.c -o "$work/$name" \
    $(PKG_CONFIG_PATH=$prefix/lib/pkgconfig pkg-config "$@" --cflags --libs clattn)
}

cmake --install "$build" --prefix "$work/prefix" > "$work/install.log"
consumer installed -DCMAKE_PREFIX_PATH="$work/prefix"
grep -q '^fmt_DIR' "$work/installed/CMakeCache.txt" &&
  { echo "consumers: the shared library's package asks for fmt"; exit 1; }
consumer from_build -Dclattn_DIR="$(cd "$build" && pwd)"
pkg_config by_pkg_config "$work/prefix"

consumer static -DCMAKE_PREFIX_PATH="$static"
pkg_config by_pkg_config_static "$static" --static

for prefix in "$work/prefix" "$static"; do
  for file in LICENSE README.md CHANGELOG.md docs/guide.md examples/first_program.cpp; do
    [ -s "$prefix/share/doc/clattn/$file" ] || { echo "consumers: no $prefix/.../$file"; exit 1; }
  done
done
# The program's pages, where the build could write them.
if grep -q '^CLATTN_HELP2MAN:FILEPATH=/' "$build/CMakeCache.txt"; then
  for page in clattn clattn-check; do
    [ -s "$work/prefix/share/man/man1/$page.1" ] || { echo "consumers: no page $page"; exit 1; }
  done
fi
export LD_LIBRARY_PATH="$work/prefix/lib"
sh tests/same_bits.sh "$work/installed/step_c" "$work/installed/step_cpp" \
  "$work/from_build/step_c" "$work/by_pkg_config" "$work/static/step_c" \
  "$work/static/step_cpp" "$work/by_pkg_config_static"
