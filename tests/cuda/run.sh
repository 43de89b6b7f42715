#!/bin/sh
# Everything that needs a GPU: builds, runs the kernels' tests and the end-to-end matches, measures
# decoding and prompts beside PyTorch, and drawing, in three tables, and runs the tests under compute-sanitizer.
#
#   tests/cuda/run.sh [BUILD]
#
# BUILD, a directory with bml, tests/test_cuda, tests/prefill_test and tests/batch_test in it, is used
# as it is, and RACECHECK, one with tests/test_cuda as kernels/ring.cuh wants it for that tool; without
# them build/ and build/racecheck are built. SANITIZE=0 leaves the sanitizer out, TORCH=0 PyTorch, XL=0
# the larger models. VALID names the text whose perplexity is compared (default
# ../shared/corpus/valid.txt.xz, if it is there).
set -eu
cd "$(dirname "$0")/../.."
build=${1:-build}
if [ $# -eq 0 ]; then
    cmake --preset release -DBML_CUDA=ON >/dev/null
    cmake --build --preset release -j "$(nproc)" --target bml test_cuda prefill_test batch_test
fi
bml=$build/bml
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
started=$(date +%s)
step() { printf '\n== %s (after %d s)\n' "$1" $(($(date +%s) - started)); }
BML_REQUIRE_CUDA=1
export BML_REQUIRE_CUDA

step "device"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader

step "kernels and passes"
"$build/tests/test_cuda" >"$work/log" 2>&1 || { cat "$work/log" && exit 1; }
grep -E 'test\(s\)|ties' "$work/log"
"$build/tests/prefill_test"
"$build/tests/batch_test"

valid=${VALID:-../shared/corpus/valid.txt.xz}
if [ -r "$valid" ]; then
    step "perplexity of the built-in model"
    xz -dc "$valid" >"$work/valid.txt"
    for format in f32 bf16 q8 q4; do
        printf '%s ' $format
        "$bml" score --backend cuda --weights $format --json "$work/valid.txt" |
            grep -o '"perplexity": [0-9.]*'
    done
fi

step "benchmarks"
"$bml" synth --preset gpt2 --dtype f32 "$work/gpt2" -q
if [ "${XL:-1}" = 1 ]; then
    for size in medium large xl; do
        "$bml" synth --preset gpt2-$size --dtype bf16 "$work/gpt2-$size" -q
    done
fi
if [ "${TORCH:-1}" = 1 ]; then
    python3 bench/peers/torch_cuda.py "$work/gpt2" 1:64 1:1000 8:512 64:512 256:512 \
        >"$work/torch.json"
    python3 bench/peers/torch_cuda.py --compile "$work/gpt2" 1x1024 8x1024 64x1024 \
        >>"$work/torch.json"
fi
python3 tests/cuda/table.py "$bml" "$work"

# Under the sanitizer a test takes minutes, so they run side by side; those of chains run no other
# kernels than these.
if [ "${SANITIZE:-1}" = 1 ]; then
    racecheck=${RACECHECK:-build/racecheck}
    if [ -z "${RACECHECK:-}" ]; then
        cmake -B build/racecheck -DCMAKE_BUILD_TYPE=Release -DBML_TESTS=ON \
            -DCMAKE_CUDA_FLAGS=-DBML_RACECHECK >/dev/null
        cmake --build build/racecheck -j "$(nproc)" --target test_cuda
    fi
    for tool in memcheck racecheck; do
        step "compute-sanitizer $tool"
        tests=$build
        [ $tool = memcheck ] || tests=$racecheck
        for first in a b e g h l m n p r s w; do
            BML_FEW_TESTS=1 BML_TESTS="test_$first*" compute-sanitizer --tool $tool \
                --error-exitcode 1 "$tests/tests/test_cuda" >"$work/$tool.$first" 2>&1 ||
                touch "$work/failed" &
        done
        wait
        grep -hE 'SUMMARY|test\(s\) run' "$work/$tool".? | sort | uniq -c
        [ ! -e "$work/failed" ] || { tail -n 40 "$work/$tool".? && exit 1; }
    done
fi
