# bml bench: its figures, its JSON, the profile and its trace.
. "$SOURCE_DIR/tests/cli/common.sh"

limits="\"limits\": \{\"read_gb_s\": $number, \"gflop_s\": $number, \"int8_gop_s\": $number\}"
speed="\"tokens\": [0-9]+, \"tok_s\": $number, \"tok_s_min\": $number, \"tok_s_max\": $number"
for weights in file f32 bf16 f16 q8 q4; do
    works bench -p 9 -n 3 -r 2 -b 2 --weights $weights --json
    output_matches "\{\"model\": \"storyteller\", .*$limits, \"prefill\": \{$speed, .*\"percent_of_peak\": $number\}, \"decode\": \{$speed, .*\"percent_of_bandwidth\": $number\}\}" "bench --json"
    [ $weights = file ] || grep -q "\"weights\": \"$weights\"" out || fail "$weights is not held as $weights"
done

works bench -p 9 -n 3 -r 1 --profile trace.json
for kernel in embedding layernorm linear qkv_split kv_append attention_cached heads_merge \
    residual_add gelu linear_transposed argmax; do
    [ "$(grep -c "^  $kernel  *[0-9]* calls" out)" -eq 2 ] || fail "$kernel is not in both tables"
    grep -q "\"name\":\"$kernel\",\"ph\":\"X\"" trace.json || fail "$kernel is not in the trace"
done
run bench -p 2 -n 1 -r 1 -q --profile no/such/file
[ "$status" = 1 ] && grep -q 'no/such/file: cannot write the trace' err || fail "an unwritable trace"
refuses 1 'more than the context' bench -p 1000 -n 100
