#!/bin/sh
# Makes DIR a set of AMD device libraries that also serves chips newer than the packaged ones: each
# chip needs one module that holds its ISA number (major * 1000 + minor * 100 + stepping).
# usage: amd_bitcode.sh DIR
set -eu
dir=${1:?usage: amd_bitcode.sh DIR}
packaged=$(dirname "$(dpkg-query -L rocm-device-libs | grep -m 1 '/ockl\.bc$')")
mkdir -p "$dir"
ln -sf "$packaged"/*.bc "$dir"/

for chip in 942:9402 950:9500 1100:11000 1101:11001 1102:11002 1150:11500 1200:12000 1201:12001; do
  module=$dir/oclc_isa_version_${chip%:*}.bc
  if [ -e "$module" ]; then continue; fi
  echo "const __constant int __oclc_ISA_version = ${chip#*:};" |
    clang-19 -x cl -cl-std=CL2.0 --target=amdgcn-amd-amdhsa -Xclang -mcode-object-version=none \
      -nogpulib -emit-llvm -c -o "$module" -
done
