#!/usr/bin/env bash
# Takes the picture of an `adaattn evaluate` page that README.md shows.
#
#     scripts/readme_picture.sh build/evaluate.html docs/images/evaluate.png
#
# Needs Chromium (CHROMIUM=... if it has another name) and fonts. The figures in the picture are
# those of the machine that ran the evaluation: run `make demo` while nothing else does.
set -eu -o pipefail

page=$(realpath "$1")
picture=$2
browser=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome)}
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT

# 1120 x 1430 is the headline, both tables and the first plot.
"$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars \
    --user-data-dir="$profile" --virtual-time-budget=10000 \
    --window-size="${SIZE:-1120,1430}" --screenshot="$profile/picture.png" "file://$page" \
    >"$profile/log" 2>&1 || { cat "$profile/log" >&2; exit 1; }

bytes=$(wc -c <"$profile/picture.png")
if [ "$bytes" -gt 400000 ]; then
    echo "$picture: expected at most 400000 bytes, got $bytes; give a smaller SIZE=1120,1430" >&2
    exit 1
fi
mkdir -p "$(dirname "$picture")"
mv "$profile/picture.png" "$picture"
echo "$picture: $bytes bytes"
