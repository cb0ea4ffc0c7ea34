#!/bin/sh
# Writes a manual page for the program and for each of its commands from what --help says.
# usage: program/man_pages.sh PROGRAM FOLDER
set -eu
export LC_ALL=C
program=$1
folder=$2
mkdir -p "$folder"
version=$("$program" --version)

page() {  # NAME DESCRIPTION COMMAND
  title=$(echo "$1" | tr '[:lower:]' '[:upper:]')
  help2man --no-info --no-discard-stderr --version-string="$version" --source="CLAttn $version" \
    --name="$2" "$3" | sed "s/^\.TH [A-Z ]*\"1\"/.TH $title \"1\"/
      s/^clattn [a-z]* \\\\-/$1 \\\\-/" > "$folder/$1.1"
}

commands=$("$program" --help | sed -n '/^Subcommands:/,$s/^  \([a-z]*\)  .*/\1/p')
[ -n "$commands" ] || { echo "man_pages: $program --help names no commands" >&2; exit 1; }
for command in $commands; do
  page "clattn-$command" "$("$program" "$command" --help | head -n 1)" "$program $command"
done
page clattn "$("$program" --help | sed -n '1s/^CLAttn: //p')" "$program"
