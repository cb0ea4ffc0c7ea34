#!/bin/sh
# Proves that layering.sh catches what it is for: a clean tree passes, each seeded line fails it.
# usage: tests/layering_selftest.sh
set -eu
check=$(cd "$(dirname "$0")" && pwd)/layering.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

plant() {  # FILE LINE: a tree in which FILE holds LINE beside what every tree has
  rm -rf "$work/tree"
  mkdir -p "$work/tree/src/base" "$work/tree/$(dirname "$1")"
  echo '#include "base/error.hpp"  // printf("in a comment")' > "$work/tree/src/base/clean.cpp"
  mkdir -p "$work/tree/program/common"
  echo 'struct Planted {' > "$work/tree/program/common/clean.hpp"
  printf '%s\n' "$2" > "$work/tree/$1"
}

passes() {
  plant "$1" "$2"
  if ! sh "$check" "$work/tree" > "$work/log" 2>&1; then
    echo "refused although legal: $1: $2"
    cat "$work/log"
    exit 1
  fi
}

fails() {
  plant "$1" "$2"
  if sh "$check" "$work/tree" > "$work/log" 2>&1; then
    echo "not caught: $1: $2"
    exit 1
  fi
  grep -q "^$1:1: " "$work/log" || { echo "caught without its place: $1: $2"; exit 1; }
}

passes src/backends/xformers_backend.cpp '#include "kernels/launch.hpp"'
passes src/backends/xformers_backend.cpp '#include "backends/xformers_backend.hpp"'
passes src/metadata/plan/planner.hpp '#include "shared/work_item.h"'
passes src/opencl/queue.cpp 'clFinish(queue);'
passes src/base/log.cpp 'fmt::print(stderr, "clattn");'
passes src/base/environment.cpp 'const char* value = std::getenv(name);'
passes program/check/check.cpp '#include "oracle/oracle.hpp"'
passes program/bench/bench.cpp '#include "program/ceilings/ceilings.hpp"'
passes program/ceilings/ceilings.cpp '#include "opencl/runtime.hpp"'
passes program/main.cpp 'std::fprintf(stderr, "clattn: %s", what);'
passes src/kernels/text.cpp '/* getenv */ int x; // std::cout'
passes program/run/run.hpp 'struct Planted;'
passes src/compat/page.cpp '#include "metadata/page_list.hpp"'
passes tools/amd-emulator/driver/queue.cpp '#include <CL/cl.h>'
passes tools/amd-emulator/driver/queue.cpp '#include "machine/wave.hpp"'
fails src/metadata/plan/planner.cpp '#include "opencl/runtime.hpp"'
fails src/opencl/program/program.cpp '#include "kernels/choose/variants.hpp"'
fails src/kv_cache/spec.cpp '#include "backends/registry.hpp"'
fails program/check/check.cpp '#include "opencl/runtime.hpp"'
fails program/fuzz/trial.hpp 'enum class Planted : std::uint8_t { kOne };'
fails program/ceilings/ceilings.cpp '#include "kernels/choose/variants.hpp"'
fails program/ceilings/ceilings.cpp 'clFinish(queue);'
fails src/kernels/bind.cpp '#include "../cli/check.hpp"'
fails src/metadata/plan/planner.cpp '#include <clattn/compat/page.hpp>'
fails src/kernels/bind.cpp '#include "compat/packed_cache.hpp"'
fails src/metadata/plan/planner.cpp '#include <CL/cl.h>'
fails src/metadata/plan/planner.cpp '#include <clattn/opencl.hpp>'
fails src/base/log.cpp '#include <nlohmann/json.hpp>'
fails src/compat/xformers_backend.cpp '#include "compat/flashinfer_backend.hpp"'
fails src/backends/bind.cpp 'check(clSetKernelArg(kernel, 0, 4, &x), "x");'
fails src/kernels/tuning.cpp 'auto* file = std::getenv("CLATTN_TUNING");'
fails src/attention/layer.cpp 'std::cout << 1;'
fails src/attention/layer.cpp '/* a */ printf("x");'
fails src/attention/layer.cpp 'std::abort();'
fails include/clattn/x.hpp '#include "base/error.hpp"'
fails include/clattn/x.hpp '#include <fmt/format.h>'
fails oracle/oracle.cpp '#include <clattn/types.hpp>'
fails kernels_cl/cache/decode.cl '// head size × tokens'
fails kernels_cl/core/decode.clh '#include "tile/sm80.clh"'
fails kernels_cl/decode.cl 'int x;'
fails src/attic/old.cpp 'int x;'
fails src/opencl/device/device.cpp '#include "machine/wave.hpp"'
fails src/opencl/device/device.cpp '#include "amd-emulator/machine/wave.hpp"'
fails tools/amd-emulator/exec/table.cpp '#include "base/error.hpp"'
fails tools/amd-emulator/exec/table.cpp '#include <clattn/types.hpp>'
fails tools/amd-emulator/exec/table.cpp '#include <fmt/format.h>'

mkdir "$work/empty"
if sh "$check" "$work/empty" > /dev/null 2>&1; then echo "an empty tree passed"; exit 1; fi
echo "layering_selftest: all seeded violations caught"
