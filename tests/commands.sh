#!/bin/sh
# Fails when a document names a command of ./dev, or a command or an option of the program, that
# their help does not: in code blocks and in code between backticks. The journal's commands are
# those of the commits that it names.
# usage: commands.sh PROGRAM
set -eu
program=${1:?usage: commands.sh PROGRAM}
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The page of the configuration is what the program prints.
"$program" options | diff docs/configuration.md - || {
  echo "commands: docs/configuration.md is stale: clattn options > docs/configuration.md"
  exit 1
}

# One command a line: of code blocks those that begin a line, of text what stands between backticks.
for page in README.md CONTRIBUTING.md docs/*.md tools/*/README.md bench/results/README.md; do
  [ "$page" != docs/journal.md ] || continue
  awk -v page="$page" '
    function told(line) {
      sub(/^([A-Z_]+=[^ ]* +)+/, "", line)  # VARIABLE=value clattn ...
      sub(/ +#.*/, "", line)
      sub(/^build\/[a-z]+\//, "", line)
      if (line ~ /^(clattn|\.\/dev) +[a-z]/) print page "\t" line
    }
    /^ *```/ { block = !block; next }
    block { told($0); next }
    { text = text " " $0 }
    END { n = split(text, parts, "`"); for (i = 2; i <= n; i += 2) told(parts[i]) }' "$page"
done | sort -u > "$work/commands"

[ -s "$work/commands" ] || { echo "commands: the documents name none"; exit 1; }
status=0
tab=$(printf '\t')
while IFS=$tab read -r page line; do
  # shellcheck disable=SC2086  # words
  set -- $line
  case $1 in
    clattn)
      help=$work/$2
      [ -e "$help" ] || "$program" "$2" --help > "$help" 2>&1 || { echo "no command" > "$help"; }
      ;;
    *) help=$work/dev ;;
  esac
  [ -e "$help" ] || ./dev help > "$help"
  if [ "$1" = ./dev ]; then
    grep -qE "^  $2( |\$)" "$help" || { echo "$page: no command in: $line"; status=1; }
    continue
  fi
  if grep -qx "no command" "$help"; then echo "$page: no command in: $line"; status=1; continue; fi
  for word in "$@"; do
    case $word in
      --*)
        option=$(echo "$word" | sed 's/[^a-z0-9-].*//')
        grep -qE -e "$option([^a-z0-9-]|\$)" "$help" || {
          echo "$page: no option $option in: $line"
          status=1
        }
        ;;
    esac
  done
done < "$work/commands"
[ $status != 0 ] ||
  echo "commands: the program has the $(wc -l < "$work/commands") that documents name"
exit $status
