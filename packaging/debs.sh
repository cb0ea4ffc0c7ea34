#!/bin/sh
# Makes the Debian packages of a finished build in FOLDER, which is emptied first.
# usage: packaging/debs.sh BUILD FOLDER
set -eu
build=$(cd "$1" && pwd)
rm -rf "$2"
mkdir -p "$2"
packages=$(cd "$2" && pwd)
log=$(mktemp)
prefix=$(sed -n 's/^CMAKE_INSTALL_PREFIX:PATH=//p' "$build/CMakeCache.txt")
trap 'rm -f "$log"; cmake -DCMAKE_INSTALL_PREFIX="$prefix" "$build" > /dev/null' EXIT

# With /usr as prefix, libraries go to Debian's folder of the architecture. Folders get the usual
# permissions, whatever the umask of the user.
umask 022
{ cmake -DCMAKE_INSTALL_PREFIX=/usr "$build" && cd "$build" && cpack -B "$packages"; } \
  > "$log" 2>&1 || { cat "$log"; exit 1; }
rm -rf "$packages/_CPack_Packages"
