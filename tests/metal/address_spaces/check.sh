# sh check.sh KERNELS: whether each .metal file is right with the address spaces of its pointers, and
# includes what it uses; then whether a planted mistake is noticed.
set -eu
kernels=$1
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/bml-spaces.XXXXXX")
trap 'rm -rf "$work"' EXIT

check() { # a directory's files, without what only a Metal compiler knows
    for file in "$1"/*.metal; do
        sed -i 's/\[\[[a-z_]*\(([0-9]*)\)*\]\]//g' "$file"
    done
    for file in "$1"/*.metal; do
        clang++ -std=c++14 -fsyntax-only -x c++ -Wall -Wextra -Werror -Wno-pragma-once-outside-header \
            -Wno-unused-function -Wno-unused-const-variable -Wno-undefined-internal \
            -Xclang -fallow-half-arguments-and-returns -I"$here" "$file" || return 1
    done
}

cp "$kernels"/*.metal "$kernels"/*.h "$work"
check "$work" || { echo "FAIL: the kernels mix address spaces" >&2 && exit 1; }

printf '%s\n' '#include <metal_stdlib>' 'static inline float first(float *x) { return x[0]; }' \
    'kernel void planted(device float *x) { x[1] = first(x); }' >"$work/planted.metal"
! check "$work" 2>/dev/null || { echo "FAIL: a pointer of no address space goes unnoticed" >&2 && exit 1; }
