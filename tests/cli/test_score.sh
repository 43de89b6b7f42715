# bml score: totals agree with the tokens, windows, JSON, errors.
. "$SOURCE_DIR/tests/cli/common.sh"

printf 'Once upon a time there was a king who had three sons.\n' >text
numbers="\"logprob\": (null|$number), \"rank\": (null|[0-9]+), \"entropy\": (null|$number)"
token="\{\"id\": [0-9]+, \"text\": \"[^ ]* ?[^ ]*\", $numbers\}"
totals="\"nll\": $number, \"perplexity\": $number, \"bits_per_byte\": $number"
works score text --json
output_matches "\{\"tokens\": \[$token(, $token)*\], $totals\}" "score --json"
mv out whole.json
[ "$(grep -o '"logprob": null' whole.json | wc -l)" -eq 1 ] ||
    fail "not exactly one token is unscored"
run score --json <text
cmp -s out whole.json || fail "standard input differs from a file"
works score - --json <text
cmp -s out whole.json || fail "- differs from a file"

# The totals follow from the tokens: nll, perplexity and bits per byte.
grep -o '"logprob": -[0-9.e+-]*' whole.json | sed 's/.* //' >logprobs
sed 's/.*"nll": //; s/"[a-z_]*": //g; s/[,}]//g' whole.json >totals
first=$(sed 's/.*"tokens": \[{"id": [0-9]*, "text": "\([^"]*\)".*/\1/' whole.json)
awk -v bytes=$(($(wc -c <text) - ${#first})) '
    NR == FNR { nll = $1; perplexity = $2; bits = $3; next }
    { sum -= $1; n++ }
    function near(a, b) { return a - b < 1e-6 * b && b - a < 1e-6 * b }
    END {
        exit !(near(nll, sum) && near(perplexity, exp(sum / n)) &&
            near(bits, sum / log(2) / bytes))
    }
' totals logprobs || fail "the totals do not follow from the tokens"

works score text
[ "$(grep -c '"' out)" -eq $(($(wc -l <logprobs) + 1)) ] ||
    fail "the table has not one line a token"
works score -q text
[ "$(wc -l <out)" -eq 4 ] || fail "-q leaves more than the totals"
[ ! -s err ] || fail "-q leaves something on standard error"

# Windows: with overlap all tokens but the first are scored; side by side, all but the first of
# each window.
ids 300 >many
ids 50 >fifty
for stride in 1 3 15 16; do
    works score --ids "$(cat fifty)" --ctx 16 --stride $stride --json
    [ $stride = 16 ] && unscored=4 || unscored=1
    [ "$(grep -o '"logprob": null' out | wc -l)" -eq "$unscored" ] ||
        fail "--stride $stride does not leave $unscored tokens of 50 unscored"
    [ "$(grep -o '"logprob": -' out | wc -l)" -eq $((50 - unscored)) ] ||
        fail "--stride $stride does not score the other tokens"
done
works score --ids "$(cat many)" --ctx 32 -q && mv out side_by_side
works score --ids "$(cat many)" --ctx 32 --stride 32 -q
cmp -s out side_by_side || fail "the default stride is not the context"
works score --ids "$(cat many)" -q && ! cmp -s out side_by_side || fail "--ctx has no effect"
for threads in 1 2 3; do
    works score --ids "$(cat many)" --json --threads $threads --chunk $((threads * 50))
    [ -f same ] || mv out same
    [ $threads = 1 ] || cmp -s out same || fail "scores depend on --threads or --chunk"
done

refuses 2 '1 to 1024' score text --stride 1025
refuses 2 '1 to 32' score text --stride 33 --ctx 32
refuses 1 'a context of 1' score text --ctx 1
refuses 1 'no-such-file: cannot open' score no-such-file
printf '' >empty
refuses 1 'has 0 tokens' score empty
printf 'a' >one
refuses 1 'has 1 tokens' score one
printf '<|endoftext|>a' >special
works score --special --json special
grep -q '"id": 8191' out || fail "--special does not find the token"
works score --json special
! grep -q '"id": 8191' out || fail "<|endoftext|> is not plain text"
printf 'a\0b\377c' >odd
works score --json odd
grep -q '"text": "\\u0000"' out || fail "NUL is lost"
