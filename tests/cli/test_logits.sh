# bml logits: the file's format, and the same bits for any threads and chunks.
. "$SOURCE_DIR/tests/cli/common.sh"

works synth --preset tiny --seed 5 model
[ ! -s out ] || fail "synth writes to standard output"
for model in model "$SOURCE_DIR/models/storyteller"; do
    case $model in model) n=128 ;; *) n=150 ;; esac
    works logits -m "$model" --ids "$(ids $n)" --out whole.npy --threads 1
    [ ! -s err ] || fail "something on standard error without a terminal"
    for threads in 1 2 3; do
        for chunk in 1 7 64 $n; do
            works logits -m "$model" --ids "$(ids $n)" --out part.npy --threads $threads \
                --chunk "$chunk"
            cmp whole.npy part.npy || fail "logits differ with --threads $threads --chunk $chunk"
        done
    done
done

works logits -p 'Once upon a time' --out four.npy
width=8192
[ "$(wc -c <four.npy)" -eq $((128 + 4 * 4 * width)) ] || fail "the file is not a header and 4 rows"
head -c 6 four.npy | od -An -c | grep -q '223 *N *U *M *P *Y' || fail "the file is not NumPy's"
head -c 128 four.npy | tail -c 118 | tr -d '\n' >header
grep -q "^{'descr': '[<>]f4', 'fortran_order': False, 'shape': (4, $width), } *\$" header ||
    fail "the header is $(cat header)"
works logits -p 'Once upon a time' --last --out last.npy
tail -c $((4 * width)) four.npy >row
tail -c +129 last.npy | cmp - row || fail "--last is not the last row"
printf 'Once upon a time' >prompt
run logits - --out stdin.npy <prompt
cmp stdin.npy four.npy || fail "standard input differs from -p"
# With all it may hold, and one more.
works logits -m model --ids "$(ids 128)" --last --out x.npy
rm x.npy
refuses 1 '129.*128' logits -m model --ids "$(ids 129)" --last --out x.npy
refuses 1 'prompt is empty' logits -p '' --out x.npy
refuses 1 'id' logits -m model --ids 512 --out x.npy
refuses 1 'no-such: \|no-such/x.npy: cannot create' logits -p a --out no-such/x.npy
mkdir directory
refuses 1 'is a directory' logits -p a --out directory
[ ! -e x.npy ] || fail "a failed run left its file"
for left in x.npy.*; do
    [ ! -e "$left" ] || fail "a failed run left $left"
done
# A link stays a link, as /dev/stdout must.
ln -s target.npy link.npy
for round in first second; do
    works logits -p 'Once upon a time' --out link.npy
    [ -L link.npy ] || fail "--out replaces the $round link"
    cmp target.npy four.npy || fail "--out does not write what a link leads to"
done
if [ -e /dev/stdout ]; then
    "$bml" logits -p 'Once upon a time' --out /dev/stdout | cmp - four.npy ||
        fail "--out /dev/stdout writes something else"
fi
if [ -c /dev/full ]; then
    refuses 1 'cannot write' logits -p a --out /dev/full
fi
