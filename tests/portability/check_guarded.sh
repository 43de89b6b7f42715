#!/bin/sh
# No AVX instruction outside the kernels that are chosen by CPUID: sh check_guarded.sh libbml.a
# An object is guarded if its functions are named after such an instruction set. Each guarded
# object's other symbols must be its own: a function that it shared could be taken from it.
set -eu
library=$1
objdump -d --no-show-raw-insn "$library" | awk -F '\t' '
    function end_of_object() {
        if (object == "")
            return
        guarded ? n_guarded++ : n_open++
        if (guarded)
            n_with_avx += avx != ""
        else if (avx != "") {
            print object ": AVX in code that every machine runs: " avx
            failed = 1
        }
    }
    / file format / { end_of_object(); object = $1; guarded = 0; avx = ""; next }
    /^[0-9a-f]+ <bml_cpu_avx[0-9a-z]*_/ { guarded = 1 }
    /^[0-9a-f]+ </ { place = $1; next }
    # VEX and EVEX instructions: their names begin with v, or they use registers that SSE has not.
    $2 ~ /^v/ && $2 !~ /^ver[rw]/ || $2 ~ /%[yz]mm|%k[0-7]/ { if (avx == "") avx = place " " $2 }
    END {
        end_of_object()
        if (!n_open || !n_with_avx) {
            print "found " n_open " open objects and " n_with_avx " with AVX: is this the library?"
            failed = 1
        }
        if (!failed)
            print "no AVX in " n_open " objects; " n_guarded " more are guarded"
        exit failed
    }'
leaks=$(nm -A --defined-only "$library" | awk '
    $(NF - 1) ~ /^[A-Z]$/ && $NF ~ /^bml_cpu_avx[0-9a-z]*_/ { next }
    $(NF - 1) ~ /^[VWu]$/ { print $NF }')
[ -z "$leaks" ] || { echo "weak symbols, of which the linker takes any: $leaks"; exit 1; }
