#!/bin/sh
# Runs COMMAND twice under oclgrind and fails when oclgrind reports anything: its exit status is the
# command's own, so the log decides.
#   races  optimised kernels: data races, accesses out of bounds, divergent barriers, API misuse
#   memory the same plus uninitialised reads, with -cl-opt-disable: that plug-in of oclgrind 21.10
#          stops at instructions that LLVM's optimiser introduces
# COMMAND must be one process: each one starts the log anew.
# usage: oclgrind.sh COMMAND [ARGUMENT...]
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export CLATTN_CACHE=0
status=0

pass() {  # NAME [FLAG...] COMMAND...
  name=$1
  shift
  log=$work/$name
  if ! oclgrind --check-api --data-races --max-errors 20 --log "$log" "$@"; then
    echo "oclgrind $name: the command failed"
    status=1
  fi
  if [ -s "$log" ]; then
    echo "oclgrind $name: findings"
    cat "$log"
    status=1
  fi
}

pass races "$@"
pass memory --uninitialized --build-options -cl-opt-disable "$@"
exit $status
