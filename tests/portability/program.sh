#!/bin/sh
# The program PROGRAM under EMULATOR (of the processor QEMU_CPU) writes the same words as NATIVE on
# this machine, in each format, and the same bits whatever the threads and chunks.
# sh program.sh NATIVE EMULATOR PROGRAM DIRECTORY-FOR-FILES
set -eu
native=$1 emulator=$2 program=$3 work=$4
ids=$(seq -s ' ' 3 7 200)
mkdir "$work"

logits() { # logits WEIGHTS THREADS CHUNK OUT
    "$emulator" "$program" logits -q -m "$work/tiny" --ids "$ids" --weights "$1" --threads "$2" \
        --chunk "$3" -o "$work/$4"
}

for weights in file q8 q4; do
    set -- generate -q --greedy -p "Once upon a time" -n 8 --weights $weights --threads 2
    "$native" "$@" >"$work/words"
    "$emulator" "$program" "$@" | cmp - "$work/words"
done
"$native" synth -q --preset tiny "$work/tiny"
for weights in f32 bf16 f16 q8 q4; do
    logits $weights 1 0 one.npy
    logits $weights 3 5 other.npy
    cmp "$work/one.npy" "$work/other.npy"
done
