#!/bin/sh
# Tests libggml-clattn.so with ggml and llama.cpp from PyPI's sources, which it builds first: ops
# compared with double precision (two versions of ggml), ggml's own tests of FLASH_ATTN_EXT, tokens
# of small models of llama.cpp. With "speed" it times llama.cpp without and with CLAttn instead.
# usage: integrations/ggml/test.sh CLATTN FOLDER [speed [LLAMA-BENCH-ARGUMENT...]]
# CLATTN: where CLAttn is installed, or its build; FOLDER: kept, later runs go on with what it has
set -eu
here=$(cd "$(dirname "$0")" && pwd)
clattn=$(cd "$1" && pwd)
mkdir -p "$2"
work=$(cd "$2" && pwd)
shift 2
jobs=${JOBS:-$(nproc)}

# llama.cpp with ggml 0.25.3, and a build of ggml 0.20.2.
llama_release=0.3.36
older_ggml=0.20.2.post1
llama=$work/llama_cpp_python-$llama_release/vendor/llama.cpp
bin=$work/llama/bin

fetch() {
  [ -x "$work/venv/bin/pip" ] || python3 -m venv "$work/venv"
  pip() { "$work/venv/bin/pip" --quiet --disable-pip-version-check "$@"; }
  pip install scikit-build-core numpy gguf
  [ -d "$llama" ] || {
    pip download --no-deps --no-binary llama-cpp-python --dest "$work" \
      "llama-cpp-python==$llama_release"
    tar -xf "$work/llama_cpp_python-$llama_release.tar.gz" -C "$work"
  }
  [ -d "$work/older" ] ||
    pip install --no-deps --target "$work/older" "libggml-python==$older_ggml"
}

# For AVX2, whatever this processor has, with backends that are loaded when a program starts.
build_llama() {  # TARGET...
  cmake -G Ninja -S "$llama" -B "$work/llama" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
    -DGGML_BACKEND_DL=ON -DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON \
    -DGGML_F16C=ON -DGGML_BMI2=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_SERVER=OFF \
    -DLLAMA_BUILD_UI=OFF > "$work/llama.log"
  cmake --build "$work/llama" --parallel "$jobs" --target "$@" >> "$work/llama.log" ||
    { tail -n 40 "$work/llama.log"; return 1; }
}
build_conformance() {
  [ -x "$bin/test-backend-ops" ] || c++ -O1 -std=c++17 -I"$llama/ggml/include" \
    -I"$llama/ggml/src" "$llama/tests/test-backend-ops.cpp" -o "$bin/test-backend-ops" \
    -L"$bin" -lggml -lggml-base -Wl,-rpath,"$bin"
}

build_plugin() {
  cmake -G Ninja -S "$here" -B "$work/plugin" -Dclattn_ROOT="$clattn" -Dclattn_DIR="$clattn" \
    -DGGML_SOURCE_DIR="$llama/ggml" -DGGML_LIBRARY_DIR="$bin" -DLLAMA_INCLUDE_DIR="$llama/include" \
    "$@" > "$work/plugin.log"
  cmake --build "$work/plugin" --parallel "$jobs" >> "$work/plugin.log" ||
    { cat "$work/plugin.log"; return 1; }
}
plugin=$work/plugin/libggml-clattn.so

with_clattn() { env GGML_BACKEND_PATH="$plugin" CLATTN_GGML_COUNTS=1 "$@"; }
fail() {
  echo "ggml: $*"
  exit 1
}

# Programs look for ggml's backends in their own folder and in the current one.
ops() {
  (cd "$bin" && CLATTN_GGML_MIN_KEYS=0 with_clattn "$work/plugin/compare")
  (cd "$work" && CLATTN_GGML_MIN_KEYS=0 LD_LIBRARY_PATH="$work/older/libggml/lib64" \
    with_clattn "$work/plugin/compare")
  CLATTN_GGML_MIN_KEYS=0 with_clattn "$bin/test-backend-ops" test -b CLAttn -o FLASH_ATTN_EXT \
    > "$work/conformance.log" 2>&1 || { tail -n 40 "$work/conformance.log"; return 1; }
  grep -E '^CLAttn: .*(computed|handed on)|tests passed' "$work/conformance.log"
}

# What must keep the backend out says so: illegal settings, a version of ggml that is not tested.
refused() {  # REASON SETTING
  (cd "$bin" && with_clattn env "$2" "$work/plugin/compare" > "$work/refusal.log" 2>&1) &&
    fail "$2 was accepted"
  grep -qF "CLAttn: is not used: $1" "$work/refusal.log" ||
    { cat "$work/refusal.log"; fail "$2: no reason"; }
}
refusals() {
  for setting in CLATTN_GGML_TYPE=cuda CLATTN_GGML_MIN_KEYS=-1 CLATTN_GGML_COUNTS=yes; do
    refused "${setting%=*} is '${setting#*=}', legal:" "$setting"
  done
  echo 'const char* ggml_version(void) { return "0.1.2"; }' |
    cc -shared -fPIC -x c - -o "$work/other_version.so"
  refused "ggml is version 0.1.2, tested with CLAttn:" "LD_PRELOAD=$work/other_version.so"
}

# The tokens of MODEL (tests/tokens.cpp) with CLAttn are those of llama.cpp with the flash attention
# of OTHER without it, and CLAttn computed some ops, or none.
same_tokens() {  # some|none OTHER MODEL CACHE SEQUENCES UNIFIED PROMPT NEW
  computed=$1
  other=$2
  model=$work/models/$3.gguf
  name="$*"
  shift 3
  "$work/plugin/tokens" "$model" "$other" "$@" > "$work/expected" 2> "$work/tokens.log" ||
    { cat "$work/tokens.log"; fail "$name"; }
  CLATTN_GGML_MIN_KEYS=256 with_clattn "$work/plugin/tokens" "$model" auto "$@" \
    > "$work/tokens" 2> "$work/tokens.log" || { cat "$work/tokens.log"; fail "$name"; }
  counts=$(grep '^CLAttn: computed' "$work/tokens.log")
  case $computed:$counts in
    some:*'computed 0,'* | none:*'computed '[1-9]*) fail "$name: $counts" ;;
  esac
  same=$("$work/venv/bin/python" "$here/tests/same_tokens.py" "$work/expected" "$work/tokens") ||
    fail "$name: $same"
  echo "ggml: $name: $same ($counts)"
}
tokens() {
  "$work/venv/bin/python" "$here/tests/models.py" "$work/models"
  cd "$bin"
  for model in llama qwen3 gemma2 gemma3 gpt-oss bloom; do
    same_tokens some off "$model" f16 1 0 300 24
    same_tokens some off "$model" f16 4 0 200 12
    same_tokens some off "$model" f16 4 1 200 12
  done
  same_tokens some off llama bf16 1 0 300 24
  same_tokens none on llama q8_0 1 0 300 24
  with_clattn ./llama-simple -m "$work/models/llama.gguf" -n 8 a b c > "$work/simple.log" 2>&1 ||
    { cat "$work/simple.log"; fail "llama-simple"; }
  grep '^CLAttn: computed' "$work/simple.log"
}

# Rounds in turns, because machines drift. MODEL, by default a random one.
speed() {
  build_llama llama-bench
  model=${MODEL:-$work/models/llama.gguf}
  [ -e "$model" ] || "$work/venv/bin/python" "$here/tests/models.py" "$work/models"
  [ $# -gt 0 ] || set -- -p 512 -n 64 -d 0,4096,16384 -r 1
  rm -f "$work"/speed-*.jsonl
  for _ in $(seq "${ROUNDS:-3}"); do
    "$bin/llama-bench" -m "$model" -fa 1 -o jsonl "$@" >> "$work/speed-ggml.jsonl"
    GGML_BACKEND_PATH=$plugin "$bin/llama-bench" -m "$model" -fa 1 -o jsonl "$@" \
      >> "$work/speed-clattn.jsonl"
  done
  "$work/venv/bin/python" "$here/tests/speed.py" "$work/speed-ggml.jsonl" \
    "$work/speed-clattn.jsonl"
}

fetch
if [ "${1:-}" = speed ]; then
  shift
  build_llama ggml-cpu llama-bench
  build_plugin
  speed "$@"
  exit
fi
build_llama ggml-cpu llama llama-simple
build_conformance
build_plugin -DGGML_CLATTN_TESTS=ON
refusals
tokens
ops
echo "ggml: passed"
