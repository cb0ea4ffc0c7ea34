#!/bin/sh
# Runs COMMAND under oclgrind and fails when oclgrind reports anything: data races, accesses out of
# bounds, divergent barriers, uninitialised reads, misuse of the API. oclgrind's exit status is the
# command's own, so its log decides. Kernels are built with -cl-opt-disable, because version 21.10
# stops at instructions that LLVM's optimiser introduces. It takes what clEnqueueFillBuffer wrote
# for uninitialised, so inputs must be written.
# COMMAND must be one process: each one starts the log anew.
# usage: oclgrind.sh COMMAND [ARGUMENT...]
set -eu
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export CLATTN_CACHE=0
status=0

oclgrind --check-api --data-races --uninitialized --max-errors 20 \
  --build-options -cl-opt-disable --log "$log" "$@" || {
  echo "oclgrind: the command failed"
  status=1
}
if [ -s "$log" ]; then
  echo "oclgrind: findings"
  cat "$log"
  status=1
fi
exit $status
