#!/bin/sh
# Runs FlashInfer's own tests through clattn.flashinfer, on the CPU; on demand, not in CI.
# FOLDER is a copy of FlashInfer's repository (its files on PyPI have no tests of attention); PYTHON
# an interpreter with clattn, PyTorch and pytest. Tests are copied to a folder of their own, where
# "cuda" becomes "cpu"; tests named after NVFP4 and CUDA graphs are left out, and of the others'
# parameter sets PEERS_SETS (3) are kept, evenly spread.
# Ends with a table: passed, failed, refused (an error of clattn's) and skipped (by the test).
# usage: PYTHON=python3 tests/peers.sh FOLDER [FILE...]
set -eu
cd "$(dirname "$0")/peers"
if [ ! -d "${1:-}/tests/attention" ]; then
  echo "peers: ${1:-no folder}, legal: a copy of FlashInfer's repository" >&2
  exit 2
fi
from=$(cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- alibi batch_decode_kernels batch_prefill batch_prefill_kernels \
  decode_fp8_calibration_scale decode_prefill_lse deepseek_mla logits_cap mla_page \
  non_contiguous_decode non_contiguous_prefill page shared_prefix_kernels single_prefill \
  sliding_window tensor_cores_decode
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/tests/attention"
cp -R "$from/tests/test_helpers" "$work/tests"
touch "$work/tests/__init__.py" "$work/tests/attention/__init__.py"
for name in "$@"; do cp "$from/tests/attention/test_$name.py" "$work/tests/attention"; done
find "$work/tests" -name '*.py' -exec sed -i \
  -e 's/"cuda:0"/"cpu"/g; s/"cuda"/"cpu"/g; s/[.]to(0)/.to("cpu")/g; s/[.]cuda()//g' \
  -e 's/device=0\b/device="cpu"/g; s/torch[.]cuda[.]synchronize()/None/g' {} +
cp flashinfer.py conftest.py "$work"
cd "$work"
export PEERS_SETS="${PEERS_SETS:-3}" PYTHONPATH="$work" OMP_NUM_THREADS=1
"${PYTHON:-python3}" -m pytest -v -p no:cacheprovider --tb=short --durations=10 \
  --continue-on-collection-errors tests/attention
