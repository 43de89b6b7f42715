# bml synth, and models without a tokenizer: ids in, ids out.
. "$SOURCE_DIR/tests/cli/common.sh"

for dtype in f32 bf16 f16; do
    works synth --preset tiny --dtype $dtype --seed 3 $dtype
    [ -s $dtype/config.json ] && [ -s $dtype/model.safetensors ] || fail "synth made no checkpoint"
    works generate -m $dtype -n 32 --greedy --ignore-eos --json -q
    grep -q "\"weights\": \"$dtype\"" out || fail "the weights of $dtype are not $dtype"
    grep -q '"text": null' out || fail "text without a tokenizer"
    works inspect $dtype --json
    grep -q '"dtype"' out || fail "inspect shows no tensors"
done
works synth --preset tiny --seed 3 again
cmp -s f32/model.safetensors again/model.safetensors || fail "the same seed gives another file"
works synth --preset tiny --seed 4 other
! cmp -s f32/model.safetensors other/model.safetensors || fail "another seed gives the same file"

works generate -m f32 --ids '1, 2 3' -n 5 --greedy --ignore-eos -q
[ "$(wc -w <out)" -eq 5 ] && [ "$(wc -l <out)" -eq 1 ] || fail "the ids are not 5 on one line"
mv out five
works generate -m f32 --ids '1 2 3' -n 5 --greedy --ignore-eos -q --echo
[ "$(cat out)" = "1 2 3 $(cat five)" ] || fail "--echo without a tokenizer is $(cat out)"
works generate -m f32/model.safetensors --ids '1 2 3' -n 5 --greedy --ignore-eos -q
cmp -s out five || fail "a model by its file differs from the directory"
works generate -m f32 -n 5 -q --ignore-eos
works score -m f32 --ids "$(ids 200)" --json
grep -q '"bits_per_byte": null' out || fail "bits per byte without text"
refuses 1 'has no tokenizer' generate -m f32 -p text
refuses 1 'tokenizer' generate -m f32 --stop x
refuses 1 '129.*128' generate -m f32 --ids "$(ids 129)" -n 1
printf x >file
refuses 1 'file' synth --preset tiny file
refuses 1 'file/below' synth --preset tiny file/below

# The human table, and what it says about each tensor.
works inspect f32
grep -q 'n_layer' out && grep -q 'wte.weight' out || fail "inspect does not show config and tensors"
works bench -m f32 -r 2 --json
limits="\"limits\": \{\"read_gb_s\": $number, \"gflop_s\": $number, \"int8_gop_s\": $number\}"
prefill="\"prefill\": \{\"tokens\": 64, .*\"percent_of_peak\": $number\}"
decode="\"decode\": \{\"tokens\": 64, .*\"percent_of_bandwidth\": $number\}"
output_matches "\{\"model\": \"f32\", .*$limits, $prefill, $decode\}" "bench --json"
works bench -m f32 -p 8 -n 4 -b 3 -r 1
grep -q '^prefill .* of 3 x 8 tokens' out && grep -q '^decode .* of 3 x 4 tokens' out ||
    fail "bench shows something else"
works bench -m f32 -p 0 -n 4 -r 1
works bench -m f32 -p 4 -n 0 -r 1
refuses 1 '129 tokens.*128' bench -m f32 -p 100 -n 29
refuses 2 'nothing to measure' bench -m f32 -p 0 -n 0
