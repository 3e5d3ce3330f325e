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
width=${WIDTH:-1120}
browser=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome)}
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT

shoot() {
    "$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run \
        --user-data-dir="$profile" --virtual-time-budget=10000 "$@" "file://$profile/page.html" \
        2>"$profile/log" || { cat "$profile/log" >&2; exit 1; }
}

# The picture ends below the first two charts, however much stands above them.
{
    sed '/<h2>Which heads adapted/{s/<h2>Which heads adapted.*//;q}' "$page"
    echo '<script>document.title = document.documentElement.scrollHeight</script>'
} >"$profile/page.html"
height=$(shoot --window-size="$width,100" --dump-dom | sed -n 's/.*<title>\([0-9]*\)<.*/\1/p')
shoot --window-size="$width,$height" --screenshot="$profile/picture.png"

bytes=$(wc -c <"$profile/picture.png")
if [ "$bytes" -gt 500000 ]; then
    echo "$picture: expected at most 500000 bytes, got $bytes; give a smaller WIDTH=$width" >&2
    exit 1
fi
mkdir -p "$(dirname "$picture")"
mv "$profile/picture.png" "$picture"
echo "$picture: $bytes bytes"
