# Memory: the weights are mapped and not copied, and running out of memory is one line.
. "$SOURCE_DIR/tests/cli/common.sh"
if sanitized; then
    echo "skipped: a build with sanitizers needs other amounts of memory"
    exit 0
fi

# GPT-2 124M in float32: what is resident stays under the file and 200 MB.
${CC:-cc} -o peak_rss "$here/peak_rss.c" || fail "cannot compile peak_rss.c"
works synth --preset gpt2 gpt2
status=0
./peak_rss peak "$bml" generate -m gpt2 -n 32 --greedy --ignore-eos --json -q >out 2>err ||
    status=$?
[ "$status" = 0 ] || fail "gpt2 does not run: status $status"
[ "$(sed 's/.*"ids": \[\([^]]*\)\].*/\1/' out | wc -w)" -eq 32 ] || fail "not 32 tokens"
size=$(wc -c <gpt2/model.safetensors)
[ "$(cat peak)" -lt $((size + 200000000)) ] ||
    fail "$(cat peak) bytes were resident, for a file of $size"
rm -r gpt2

# From too little address space to enough: either it works or it ends with status 1 and one line.
failures=0
for kilobytes in 8000 12000 16000 20000 30000 40000 50000 60000 70000 80000 90000 100000 120000 \
    150000 200000 300000; do
    # The loader itself needs some, and its error is not ours.
    (ulimit -v $kilobytes && "$bml" --version) >/dev/null 2>&1 || continue
    for work in 'generate -p a -n 4' 'score -q text' 'logits -p a --out x.npy' 'tokenize text' \
        'inspect'; do
        printf 'Once upon a time\n' >text
        status=0
        # shellcheck disable=SC2086
        (ulimit -v $kilobytes && exec "$bml" $work) >out 2>err || status=$?
        [ "$status" = 0 ] || {
            : >out
            check_refusal 1 'memory\|allocate\|thread' "bml $work with $kilobytes kB"
            failures=$((failures + 1))
        }
    done
done
[ $failures -gt 0 ] || fail "no limit was low enough to test anything"
