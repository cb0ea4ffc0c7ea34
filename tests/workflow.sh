#!/bin/sh
# Fails unless the jobs of .github/workflows/ci.yml run each function of a plain .ci/run once, and
# the YAML files for GitHub and pre-commit can be parsed.
# usage: tests/workflow.sh
set -eu
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0

sed ':join; /\\$/ { N; s/\\\n//; b join; }' .ci/run |
  sed -nE 's/^([A-Z_]+=[^ ]+ )?(in_turn|at_once) ".*" //p' |
  tr -s ' ' '\n' | grep . | sort > "$work/all"
sed -n 's/^ *functions: //p' .github/workflows/ci.yml | tr ' ' '\n' | sort > "$work/jobs"
[ "$(wc -l < "$work/all")" -gt 15 ] || { echo "workflow: found no functions in .ci/run"; status=1; }
cmp -s "$work/all" "$work/jobs" || {
  echo "workflow: functions of .ci/run (<) and in jobs of .github/workflows/ci.yml (>) differ:"
  diff "$work/all" "$work/jobs" || true
  status=1
}

if python3 -c 'import yaml' 2> /dev/null; then
  python3 - .github/workflows/*.yml .pre-commit-config.yaml << 'SCRIPT' || status=1
import sys, yaml
for path in sys.argv[1:]:
    with open(path, encoding="utf-8") as file:
        try:
            yaml.safe_load(file)
        except yaml.YAMLError as error:
            sys.exit(f"workflow: {path}: {error}")
SCRIPT
else
  echo "workflow: no PyYAML here, so the syntax of YAML files is not checked"
fi

[ $status != 0 ] || echo "workflow: jobs run the $(wc -l < "$work/all") functions of .ci/run"
exit $status
