#!/usr/bin/env bash
# Runs the CPU benchmark of operators with two installed versions, in turns.
#
#     scripts/benchmark_in_turns.sh BASE HEAD RESULTS
#
# BASE and HEAD are checkouts in which `make install` has run. Both are timed by HEAD's benchmark,
# so that only the library differs. RUNS=6 of each side is the fewest that compare_benchmarks.py
# accepts for up to 46 comparisons; which side goes first changes from turn to turn.
set -eu -o pipefail

declare -A checkouts
checkouts[base]=$(realpath "$1")
checkouts[head]=$(realpath "$2")
mkdir -p "$3"
results=$(realpath "$3")

for run in $(seq "${RUNS:-6}"); do
    order=(base head)
    [ $((run % 2)) -eq 1 ] || order=(head base)
    for side in "${order[@]}"; do
        checkout=${checkouts[$side]}
        (cd "${checkouts[head]}" && "$checkout/.venv/bin/python" -m benchmarks.ops.run --device cpu \
            --rounds "${ROUNDS:-3}" --only "${ONLY:-}" --out "$results/$side/$run" \
            --commit "$(git -C "$checkout" rev-parse --short HEAD)")
    done
done
