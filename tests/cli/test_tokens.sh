# bml tokenize and detokenize: bytes there and back, JSON, special tokens.
. "$SOURCE_DIR/tests/cli/common.sh"

round_trip() {
    works tokenize "$1" && mv out ids_of_it
    run detokenize - <ids_of_it
    [ "$status" = 0 ] && cmp -s out "$1" || fail "$1 does not come back from its ids"
    works tokenize "$1" --json
    output_matches "\{\"ids\": $integers, \"tokens\": \[.*\]\}" "tokenize --json"
    sed 's/{"ids": \(.*\), "tokens": .*/\1/' out >ids_of_it
    run detokenize <ids_of_it
    [ "$status" = 0 ] && cmp -s out "$1" || fail "$1 does not come back from its ids in JSON"
}

printf 'Once upon a time, there wasn'\''t a king.\n\n  Two  spaces\tand tabs 12345 \n' >english
{
    printf 'na\303\257ve \346\227\245\346\234\254 e\314\201 \302\240\302\205'
    printf '\360\237\221\251\342\200\215\360\237\221\247'
} >unicode
printf 'a\0b\000\000' >nul
printf '\377\376\300\200\355\240\200\360\237\221 \342\202 x\200' >invalid
printf '' >empty
printf '<|endoftext|>x' >special
head -c 20000 /dev/urandom >random
cat "$SOURCE_DIR/src/cli/options.c" >source_text
for file in english unicode nul invalid empty special random source_text; do
    round_trip $file
done

works tokenize english
[ "$(wc -l <out)" -eq 1 ] || fail "the ids are not on one line"
works tokenize special
! grep -qw 8191 out || fail "<|endoftext|> is not plain text"
works tokenize --special special
[ "$(cut -d ' ' -f 1 out)" = 8191 ] || fail "--special does not find the token"
works detokenize 8191
[ "$(cat out)" = '<|endoftext|>' ] || fail "detokenize loses special tokens"
works detokenize '2962 651' 258,545
[ "$(cat out)" = 'Once upon a time' ] || fail "detokenize of arguments is wrong: $(cat out)"
works tokenize --json invalid
grep -q '�' out || fail "invalid UTF-8 is not U+FFFD in JSON"

refuses 1 'no-such-file: cannot open' tokenize no-such-file
refuses 1 '8192' detokenize 8192
printf '1 2 x' >bad
run detokenize <bad
check_refusal 1 "'x' at byte 4" "a list of ids with a letter"
works synth --preset tiny model
refuses 1 'tokenizer' tokenize -m model
