#!/bin/sh
# Runs every fuzz target for some seconds: sh run.sh DIRECTORY-OF-TARGETS SECONDS
# New inputs go to a temporary directory; the committed corpus (corpus/NAME) is only read.
set -eu
targets=$1 seconds=$2
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
count=0
for source in "$here"/fuzz_*.c; do
    target=$(basename "$source" .c)
    name=${target#fuzz_}
    mkdir -p "$work/$name"
    echo "fuzzing $name for $seconds s"
    if ! "$targets/$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=3000 \
        -artifact_prefix="$work/" "$work/$name" "$here/corpus/$name" >"$work/log" 2>&1; then
        cat "$work/log"
        mkdir -p "$here/found" && cp "$work"/crash-* "$work"/timeout-* "$work"/oom-* "$here/found" 2>/dev/null || true
        echo "$target failed; its input is in $here/found" >&2
        exit 1
    fi
    grep -E "^Done|stat::number_of_executed_units" "$work/log" | head -1
    count=$((count + 1))
done
echo "$count passed, 0 failed"
