#!/bin/sh
# The tests on processors that this machine is not, under qemu-user: older x86-64 ones with the
# release build as it is, and 64-bit Arm with and without the dot product with the cross-build.
# sh run.sh BUILD AARCH64-BUILD
set -eu
native=$1 arm=$2
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Runs a command with its output in a log that is only shown when it fails, or takes a quarter of an
# hour: some minutes are usual.
quietly() {
    name=$1
    shift
    if timeout 900 "$@" >"$work/$name.log" 2>&1; then
        echo "passed: $name"
    else
        cat "$work/$name.log"
        echo "failed: $name" >&2 # after a timeout the log ends where it hung
        return 1
    fi
}

# A processor's kernels, if named, against float64 and NumPy; then the program.
processor() { # processor EMULATOR BUILD PROCESSOR [KERNELS]
    QEMU_CPU=$3
    export QEMU_CPU
    if [ $# = 4 ]; then
        quietly "$3.kernels" "$1" "$2/tests/test_kernels" "$4"
        quietly "$3.goldens" "$1" "$2/tests/test_kernel_goldens"
    fi
    quietly "$3.program" sh "$here/program.sh" "$native/bml" "$1" "$2/bml" "$work/$3"
}

old_x86() {
    processor qemu-x86_64-static "$native" qemu64 base  # SSE3 at most
    processor qemu-x86_64-static "$native" SandyBridge  # AVX, but not AVX2: base
    processor qemu-x86_64-static "$native" Haswell avx2
}

arm() {
    processor qemu-aarch64-static "$arm" cortex-a76 dotprod
    processor qemu-aarch64-static "$arm" cortex-a57 base # without the dot product
    # The rest of the suite, but for two that take minutes: program.sh does some of what they do.
    quietly cortex-a57.suite ctest --timeout 300 --test-dir "$arm" -E 'test_kernel|test_session|test_storyteller'
}

quietly guarded sh "$here/check_guarded.sh" "$native/libbml.a"
old_x86 &
x86_job=$!
arm &
arm_job=$!
failed=0
wait $x86_job || failed=1
wait $arm_job || failed=1
exit $failed
