#!/bin/sh
# Everything that needs a GPU: builds, runs the kernels' tests and the end-to-end matches, the same
# under compute-sanitizer, then the decode benchmarks beside PyTorch, and prints one table.
#
#   tests/cuda/run.sh [BUILD]
#
# BUILD, a directory with bml and tests/test_cuda in it, is used as it is; without it build/ is
# built. SANITIZE=0 leaves the sanitizer out, TORCH=0 PyTorch, XL=0 the largest model.
set -eu
cd "$(dirname "$0")/../.."
build=${1:-build}
if [ $# -eq 0 ]; then
    cmake --preset release -DBML_CUDA=ON >/dev/null
    cmake --build --preset release -j "$(nproc)" --target bml test_cuda
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
step() { printf '\n== %s\n' "$1"; }

step "device"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader

step "kernels and passes"
BML_REQUIRE_CUDA=1 "$build/tests/test_cuda" >"$work/log" 2>&1 || { cat "$work/log" && exit 1; }
grep -E 'test\(s\)|greedy' "$work/log"

if [ "${SANITIZE:-1}" = 1 ]; then
    for tool in memcheck racecheck; do
        step "compute-sanitizer $tool"
        BML_REQUIRE_CUDA=1 BML_FEW_TESTS=1 compute-sanitizer --tool "$tool" --error-exitcode 1 \
            "$build/tests/test_cuda" >"$work/log" 2>&1 || { tail -40 "$work/log" && exit 1; }
        grep -E 'SUMMARY|test\(s\)' "$work/log"
    done
fi

step "GPT-2 124M, float32: 256 greedy tokens, CPU and CUDA"
"$build/bml" synth --preset gpt2 --dtype bf16 "$work/gpt2" -q
for backend in cpu cuda; do
    python3 - "$build/bml" "$work/gpt2" "$backend" >"$work/$backend.ids" <<'PYTHON'
import json, subprocess, sys
bml, model, backend = sys.argv[1:]
command = [bml, "bench", "-m", model, "--backend", backend, "--weights", "f32", "-p", "1", "-n", "256"]
print(json.loads(subprocess.check_output(command + ["-r", "1", "-q", "--json"]))["decode"].get("ids"))
PYTHON
done
