#!/bin/sh
# Makes the Debian packages of a build, installs them into a bare root of this Debian, and there
# builds and runs programs by find_package and by pkg-config, which give the bits in FILE. Needs
# root (or sudo) that may mount, and mmdebstrap.
# usage: tests/packages.sh BUILD FILE
set -eu
cd "$(dirname "$0")/.."
build=$1
bits=$2
work=$(mktemp -d)
prefix=$(sed -n 's/^CMAKE_INSTALL_PREFIX:PATH=//p' "$build/CMakeCache.txt")
trap 'rm -rf "$work"; cmake -DCMAKE_INSTALL_PREFIX="$prefix" "$build" > /dev/null' EXIT
suite=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)

# With /usr as prefix libraries lie in Debian's folder of the architecture.
cmake -DCMAKE_INSTALL_PREFIX=/usr "$build" > "$work/log" || { cat "$work/log"; exit 1; }
rm -rf "$build/packages"
(cd "$build" && cpack -B packages) > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }

mkdir "$work/tried"
cp -R "$build"/packages/*.deb examples/consumer examples/first_program.cpp tests/same_bits.sh \
  "$work/tried"
cp "$bits" "$work/tried/bits"
cat > "$work/tried/try.sh" << 'SCRIPT'
set -eu
cd /tried
apt-get install -y -q ./*.deb > log || { cat log; exit 1; }
clattn devices > log || { cat log; exit 1; }
grep 'compute units' log
[ -e /usr/share/man/man1/clattn.1.gz ] || [ -e /usr/share/man/man1/clattn.1 ]
ls "/usr/lib/$(gcc -print-multiarch)/libclattn.so"
for package in libclattn0.1 libclattn-dev; do
  [ "$(dpkg-query -W -f='${Multi-Arch}' $package)" = same ] || exit 1
done
cmake -S consumer -B by_cmake > log || { cat log; exit 1; }
cmake --build by_cmake > log || { cat log; exit 1; }
by_cmake/first_program
cc -std=c99 consumer/step.c -o by_pkg_config $(pkg-config --cflags --libs clattn)
sh same_bits.sh "cat bits" by_cmake/step_c by_cmake/step_cpp ./by_pkg_config
apt-get purge -y -q libclattn0.1 > log || { cat log; exit 1; }
[ ! -e /usr/include/clattn ]
SCRIPT

# A root with a compiler and a driver; what else the packages need has to be among what they name.
as_root=
[ "$(id -u)" = 0 ] || as_root=sudo
$as_root mmdebstrap --quiet --variant=apt --dpkgopt=force-unsafe-io \
  --aptopt='APT::Install-Recommends "0"' \
  --include=cmake,g++,make,pkg-config,pocl-opencl-icd \
  --customize-hook="copy-in $work/tried /" \
  --customize-hook="chroot \"\$1\" sh /tried/try.sh" "$suite" /dev/null
echo "packages: installed, used and removed in a bare root"
