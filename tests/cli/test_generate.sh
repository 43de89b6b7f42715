# bml generate with the built-in model: text, JSON, seeds, stop strings, echo, context limits.
. "$SOURCE_DIR/tests/cli/common.sh"
prompt='Once upon a time'

# ---- output ----
works generate -p "$prompt" -n 20 --greedy -q
[ ! -s err ] || fail "-q leaves something on standard error"
mv out greedy
[ -s greedy ] || fail "no text"
works generate -p "$prompt" -n 20 --greedy
cmp -s out greedy || fail "the text changes with -q"
grep -q 'tokens/s' err || fail "the statistics do not tell the speed"
! grep -q "$(printf '\r')" err || fail "progress although standard error is not a terminal"
works generate -p "$prompt" -n 20 --temperature 0 -q
cmp -s out greedy || fail "temperature 0 is not greedy"
works generate -p "$prompt" -n 20 --greedy -q --echo
{ printf %s "$prompt" && cat greedy; } >expected
cmp -s out expected || fail "--echo does not put the prompt in front"
printf %s "$prompt" >prompt.txt
works generate -f prompt.txt -n 20 --greedy -q
cmp -s out greedy || fail "-f differs from -p"
run generate - -n 20 --greedy -q <prompt.txt
cmp -s out greedy || fail "standard input differs from -p"
run generate -f - -n 20 --greedy -q <prompt.txt
cmp -s out greedy || fail "-f - differs from -p"
works tokenize prompt.txt
works generate --ids "$(cat out)" -n 20 --greedy -q --echo
cmp -s out expected || fail "--ids differs from -p"

# ---- JSON ----
prefill="\"prefill_tokens\": 4, \"prefill_tok_s\": $number"
decode="\"decode_tokens\": 9, \"decode_tok_s\": $number"
model='"model": "storyteller", "backend": "cpu", "weights": "bf16"'
ids="\"prompt_ids\": $integers, \"ids\": $integers"
text="$ids, \"text\": \".*\", \"finish_reason\": \"length\""
stats="\"stats\": \{\"load_ms\": $number, $prefill, $decode\}"
works generate -p "$prompt" -n 10 --greedy --json -q
output_matches "\{$model, $text, $stats\}" "generate --json"
reference='"prompt_ids": \[2962, 651, 258, 545\], "ids": \[450, 307, 258, 715, 429, 341, 860, '
grep -q "$reference" out ||
    fail "the greedy ids are not those of models/storyteller/reference.json"
works generate -p "$prompt" -n 0 --json -q
grep -q '"ids": \[\], "text": "", "finish_reason": "length"' out || fail "-n 0 generates something"
printf 'a\377b' >odd
works generate -f odd -n 1 --greedy --json --echo -q
grep -q '"text": "a�b' out || fail "a byte that is not UTF-8 is not U+FFFD in JSON"
name=$(printf 'm\377')
if cp -r "$SOURCE_DIR/models/storyteller" "./$name" 2>/dev/null; then # not every file system takes it
    works generate -m "./$name" -n 1 --json -q
    grep -q '"model": "./m�"' out || fail "a path that is not UTF-8 is not U+FFFD in JSON"
    works bench -m "./$name" -p 1 -n 1 -r 1 --json
    grep -q '"model": "./m�"' out || fail "a path that is not UTF-8 is not U+FFFD in bench's JSON"
fi
works generate -f odd -n 0 --echo -q
cmp -s out odd || fail "a byte that is not UTF-8 changes in plain output"

# ---- the end of a text: any id of a list ----
mkdir eos
ln -s "$SOURCE_DIR"/models/storyteller/* eos/
rm eos/config.json
sed 's/"eos_token_id": 8191/"eos_token_id": [8191, 258]/' \
    "$SOURCE_DIR/models/storyteller/config.json" >eos/config.json
works generate -m eos -p "$prompt" -n 10 --greedy --json -q
grep -q '"ids": \[450, 307\], .*"finish_reason": "stop"' out || fail "the second eos id does not stop"
works generate -m eos -p "$prompt" -n 10 --greedy --json -q --ignore-eos
grep -q '"ids": \[450, 307, 258, 715, ' out || fail "--ignore-eos stops at the second eos id"

# ---- sampling ----
sample() { works generate -p "$prompt" -n 24 -q "$@"; }
sample --seed 7 && mv out first
sample --seed 7 && cmp -s out first || fail "the same seed gives another text"
sample --seed 7 --threads 1 && cmp -s out first || fail "the text depends on --threads"
sample --seed 8 && ! cmp -s out first || fail "another seed gives the same text"
sample --seed 18446744073709551615
for extreme in '--temperature 1e-30' '--temperature 1e-7' '--top-k 1' '--top-p 0' '--min-p 1'; do
    # shellcheck disable=SC2086
    sample $extreme --seed 3 && mv out sampled && sample --greedy && cmp -s out sampled ||
        fail "$extreme is not greedy"
done
for extreme in '--top-k 0' '--top-k -1' '--top-k 8192' '--top-k 8193' '--top-k 2147483647' \
    '--top-p 0.9999999' '--top-p 1' '--temperature 1e30' '--repetition-penalty 1e30' \
    '--repetition-penalty 1e-30'; do
    # shellcheck disable=SC2086
    sample $extreme --seed 3
done
sample --top-k 0 --seed 3 && mv out all
sample --top-k 8193 --seed 3 && cmp -s out all || fail "top-k 0 and above the vocabulary differ"

# ---- no prompt ----
works generate -n 8 --json -q
grep -q '"prompt_ids": \[8191\]' out || fail "no prompt does not mean the end-of-text token"
works generate -n 8 --json -q -p ''
grep -q '"prompt_ids": \[8191\]' out || fail "an empty prompt does not mean the end-of-text token"
works generate -n 0 --json -q -p '<|endoftext|>'
! grep -q '"prompt_ids": \[8191\]' out || fail "<|endoftext|> is not plain text"
works generate -n 0 --json -q -p '<|endoftext|>' --special
grep -q '"prompt_ids": \[8191\]' out || fail "--special does not make <|endoftext|> a token"

# ---- stop strings ----
stop=$(cut -c 20-26 greedy)
whole=$(cat greedy)
works generate -p "$prompt" -n 20 --greedy -q --stop "$stop"
printf %s "${whole%%"$stop"*}" >expected
cmp -s out expected || fail "--stop '$stop' does not end the text before it"
works generate -p "$prompt" -n 20 --greedy -q --json --stop 'zzzz' --stop "$stop"
grep -q '"finish_reason": "stop"' out || fail "the finish_reason of a stop string is not stop"
last=$(tail -c 4 greedy)
works generate -p "$prompt" -n 20 --greedy -q --stop "${last}#never"
cmp -s out greedy || fail "a partial stop string at the end is lost"

# ---- the limits of the context ----
works generate --ids "$(ids 1024)" -n 5 --json -q --seed 1
grep -q '"finish_reason": "length"' out || fail "a full context does not end with length"
works generate --ids "$(ids 1020)" -n -1 --ignore-eos --json -q --seed 1
grep -q '"finish_reason": "length"' out || fail "-n -1 does not end with length"
refuses 1 '1025.*1024' generate --ids "$(ids 1025)" -n 1
refuses 1 '5.*4' generate --ids "$(ids 5)" --ctx 4 -n 1
refuses 1 '1025.*1024' generate -p a --ctx 1025
works generate -p "$prompt" -n 20 --greedy -q --kv f16
works generate -p "$prompt" -n 20 --greedy -q --kv bf16 --ctx 64 --chunk 3

# ---- what can go wrong around it ----
refuses 1 'no-such-file: cannot open' generate -f no-such-file
refuses 1 '/: cannot read' generate -f /
refuses 1 'no-such-model' generate -m ./no-such-model -p a
refuses 1 'id' generate --ids 8192 -n 1
works generate -p "$prompt" -n 20 --greedy -q --weights bf16
cmp -s out greedy || fail "--weights bf16 changes a bfloat16 model"
works generate -p "$prompt" -n 20 --greedy -q --weights f32
if [ -c /dev/full ]; then
    status=0
    "$bml" generate -n 4 --ignore-eos >/dev/full 2>err || status=$?
    : >out
    check_refusal 1 'cannot write to standard output' "a full disk"
fi
{ "$bml" generate -p "$prompt" -n -1 2>err && echo 0 >code || echo $? >code; } | head -c 1 >out
[ "$(cat code)" = 1 ] || fail "a closed pipe gives status $(cat code)"
[ ! -s err ] || fail "a closed pipe is not quiet"

# ---- interrupted: what there is, the statistics, and the signal's status ----
rm out
# One thread and wide weights: seconds of work, of which the first tenths are enough.
"$bml" generate -p "$prompt" -n -1 --ignore-eos --threads 1 --weights f32 >out 2>err &
pid=$!
for _ in $(seq 300); do
    [ ! -s out ] || break
    sleep 0.1
done
kill -TERM $pid
status=0
wait $pid || status=$?
[ "$status" = 143 ] || fail "SIGTERM gives status $status instead of 143"
grep -q 'interrupted' err || fail "no statistics after an interrupt"
