#!/bin/sh
# Runs the blocks of CMake and shell in docs/howto.md, in a folder where the names that they use
# exist: the sources as `clattn`, the README's first program as the application. Only paths, the
# build type (no optimiser, several sources as one) and the device are changed.
# usage: tests/howto.sh BUILD FOLDER: BUILD holds the program; the static library is then in
# FOLDER/opt
set -eu
build=$(cd "$1" && pwd)
rm -rf "$2"
mkdir -p "$2"
work=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."
source=$PWD

# The N-th block of a language under a heading.
block() {  # HEADING LANGUAGE N
  awk -v heading="## $1" -v fence="\`\`\`$2" -v n="$3" '
    { sub(/^ +/, "") }
    /^## / { under = $0 == heading; next }
    under && $0 == fence { inside = ++count == n; next }
    /^```$/ { inside = 0 }
    inside { print; found = 1 }
    END { exit !found }' docs/howto.md ||
    { echo "howto: no block $3 of $2 under \"$1\" in docs/howto.md" >&2; return 1; }
}
run() {  # HEADING N [SED COMMAND]: in $work
  block "$1" sh "$2" > "$work/written"
  # Marks first, since the folders themselves may be in /tmp or /opt.
  sed "s#/tmp/#@/#g; s#/opt/#@/opt/#g; s#-S clattn#-S @/$sources#; s#@#$work#g;
    s#=Release#=None#; s#--device gpu#--device cpu#; s#--device 1:0#--device 0:0#; ${3:-}" \
    "$work/written" > "$work/block"
  (cd "$work" && PATH="$build:$PATH" sh -eux block) > "$work/block.log" 2>&1 ||
    { cat "$work/block.log"; echo "howto: block $2 of \"$1\" failed"; return 1; }
}
project() {  # NAME CMAKE ARGUMENT...: builds NAME/CMakeLists.txt, whose program becomes ./app
  name=$1
  shift
  cp "$source/examples/first_program.cpp" "$work/$name/main.cpp"
  { cmake -G Ninja -S "$work/$name" -B "$work/$name/build" "$@" &&
    cmake --build "$work/$name/build"; } > "$work/$name.log" ||
    { cat "$work/$name.log"; echo "howto: $name does not build"; return 1; }
  cp "$work/$name/build/app" "$work/app"
  "$work/app"
}

# As a subdirectory the library's files are compiled with the same flags. Once is enough: they are
# built where the subdirectory's will be, so that the compiler's cache knows their paths.
export CMAKE_GENERATOR=Ninja CMAKE_CXX_COMPILER_LAUNCHER=ccache
export CCACHE_DIR="$work/ccache"
sources=subdirectory/third_party/clattn
unity=-DCMAKE_UNITY_BUILD=ON
tree=subdirectory/build/third_party/clattn
mkdir -p "$work/subdirectory/third_party"
ln -s "$source" "$work/$sources"
run "Link the library" 1 "s#\(-B\|--build\|--install\) build#\1 $tree#; s#=None#& $unity#"
rm -r "$work/subdirectory/build"
mkdir -p "$work/installed"
block "Link the library" cmake 1 > "$work/installed/CMakeLists.txt"
project installed -DCMAKE_PREFIX_PATH="$work/opt/clattn"
block "Link the library" cmake 2 > "$work/add"
sed -e "/^find_package/{r $work/add" -e 'd}' "$work/installed/CMakeLists.txt" \
  > "$work/subdirectory/CMakeLists.txt"
project subdirectory -DCMAKE_BUILD_TYPE=None $unity
cp "$source/examples/first_program.cpp" "$work/main.cpp"
run "Link the library" 2 '/# shared$/d'
"$work/a.out"
cmake --install "$build" --prefix "$work/shared/clattn" > "$work/install.log"
run "Link the library" 2 "/# static\$/d; s#$work/opt#$work/shared#g"
"$work/a.out"  # which finds its library by -rpath
run "Choose a device" 1
run "See why a kernel was taken" 1
run "Start without waiting for compilers" 1
for n in 1 2 3; do run "Debug a wrong result" $n; done
blocks=$(grep -cE '^ *```(sh|cmake)$' docs/howto.md)
[ "$blocks" = 10 ] || { echo "howto: 10 of docs/howto.md's $blocks blocks ran"; exit 1; }
echo "howto: all $blocks blocks of shell and CMake ran"
