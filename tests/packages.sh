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
trap 'rm -rf "$work"' EXIT
suite=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)

sh packaging/debs.sh "$build" "$build/packages"

mkdir "$work/tried"
cp "$build"/packages/*.deb tests/same_bits.sh "$work/tried"
cp "$bits" "$work/tried/bits"
cat > "$work/tried/try.sh" << 'SCRIPT'
set -eu
unset CMAKE_C_COMPILER_LAUNCHER CMAKE_CXX_COMPILER_LAUNCHER  # outside there may be one
cd /tried
fail() {
  echo "packages: $*"
  exit 1
}
apt-get install -y -q ./*.deb > log || { cat log; exit 1; }
clattn devices > log || { cat log; exit 1; }
grep 'compute units' log
documents=/usr/share/doc/clattn
for file in /usr/share/man/man1/clattn.1 /usr/share/man/man1/clattn-check.1 \
  $documents/README.md $documents/CHANGELOG.md $documents/LICENSE $documents/docs/guide.md \
  $documents/docs/images/speed.svg $documents/examples/first_program.cpp \
  /usr/share/doc/clattn-doc/LICENSE /usr/share/doc/clattn-tools/LICENSE; do
  [ -s $file ] || fail "no $file"
done
ls "/usr/lib/$(gcc -print-multiarch)/libclattn.so"
library=$(dpkg-query -S '/usr/lib/*/libclattn.so.*' | sed 's/:.*//' | sort -u)
for package in "$library same" "libclattn-dev same" "clattn-doc foreign"; do
  [ "$(dpkg-query -W -f='${Multi-Arch}' "${package% *}")" = "${package#* }" ] ||
    fail "not Multi-Arch: $package"
done
# The examples as they are installed.
cmake -S $documents/examples/consumer -B by_cmake > log || { cat log; exit 1; }
cmake --build by_cmake > log || { cat log; exit 1; }
by_cmake/first_program
cc -std=c99 $documents/examples/consumer/step.c -o by_pkg_config \
  $(pkg-config --cflags --libs clattn)
sh same_bits.sh "cat bits" by_cmake/step_c by_cmake/step_cpp ./by_pkg_config
apt-get purge -y -q "$library" clattn-doc > log || { cat log; exit 1; }
for folder in /usr/include/clattn $documents; do
  [ ! -e $folder ] || fail "$folder stays behind"
done
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
