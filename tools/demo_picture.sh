#!/bin/sh
# Draws the picture of README.md: the upper part of a page of `clattn replay --html`, such as
# ./dev demo's. Needs Debian's packages chromium and pngquant.
# usage: tools/demo_picture.sh build/release/replay.html docs/images/demo.png
set -eu
page=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$work/profile" \
  --window-size=1240,1360 --screenshot="$work/page.png" "file://$page" > "$work/log" 2>&1 ||
  { cat "$work/log"; exit 1; }
pngquant --force --strip --output "$2" 64 "$work/page.png"
echo "demo_picture: $2 has $(wc -c < "$2") bytes"
