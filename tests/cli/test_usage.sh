# Wrong usage gives exit status 2 and one line; help and version are there for every command.
. "$SOURCE_DIR/tests/cli/common.sh"
bml=$program # --help shows defaults, which must be the program's own

works --version
grep -Eqx 'bml [0-9]+\.[0-9]+\.[0-9]+' out || fail "--version prints something else"
works --help
for command in generate score logits tokenize detokenize bench inspect synth; do
    grep -q "^  $command " out || fail "bml --help does not name $command"
done
for command in generate score logits tokenize detokenize bench inspect synth; do
    works "$command" --help
    grep -q "^usage: bml $command" out || fail "$command --help has no usage line"
    [ -z "$(awk 'length > 80' out)" ] || fail "$command --help has lines over 80 columns"
    mv out help
    works help "$command"
    cmp -s out help || fail "help $command differs from $command --help"
    refuses 2 'unknown option --no-such' "$command" --no-such
done

refuses 2 'no command'
refuses 2 'did you mean generate?' genrate
refuses 2 'unknown option' --no-such
refuses 2 'did you mean score?' help scor
refuses 2 'did you mean --temperature?' generate --temprature 1
refuses 2 'did you mean --temperature?' generate --temp=1
refuses 2 'unknown option -Z' generate -Z
refuses 2 '.-n needs a value' generate -n
refuses 2 '.--top-p needs a value' generate --top-p
refuses 2 '.--json takes no value' generate --json=yes
refuses 2 "unexpected argument 'hello'" generate hello
refuses 2 'one source of tokens' generate -p a -f b
refuses 2 'one source of tokens' generate -p a -
refuses 2 'contradict' generate --greedy --temperature 0.5
refuses 2 '--stop takes' generate --stop '' -p a
refuses 2 'from 0 to 1' generate --top-p 1.01
refuses 2 'from 0 to 1' generate --top-p=-0.1
refuses 2 'from 0 to 1' generate --min-p nan
refuses 2 'at least 0' generate --temperature=-1
refuses 2 'at least 0' generate --temperature inf
refuses 2 'above 0' generate --repetition-penalty 0
for wrong in '' ' 1' 1x 0x10 1.5 -2 99999999999 99999999999999999999 one; do
    refuses 2 'whole number, at least -1' generate -n "$wrong"
done
for wrong in '' -1 1x 18446744073709551616 1.0; do
    refuses 2 'from 0 to 18446744073709551615' generate --seed "$wrong"
done
refuses 2 'auto|cpu|cuda|metal' generate --backend tpu
refuses 2 'f32|f16|bf16' generate --kv q8
refuses 2 'from 0 to 1024' generate --threads 1025
refuses 2 'at least 1' score --stride 0
refuses 2 '--out' logits -p a
refuses 2 'give a prompt' logits --out x.npy
refuses 2 '--preset' synth out
refuses 2 'tiny|gpt2' synth --preset gpt3 out
refuses 2 'name the directory' synth --preset tiny
refuses 2 'not part of a list of token ids' detokenize 1 x
refuses 2 'not part of a list of token ids' generate --ids '1;2'
refuses 2 'larger than 2147483647' detokenize 2147483648
refuses 2 'unexpected argument' bench model
refuses 2 'one model, not two' inspect -m a b

# A line break in an argument does not break the one line.
refuses 2 'unknown option --a?b' generate "--a
b"

# A backend that this build or this machine has not is refused in one line that names a way out.
for backend in cuda metal; do
    run generate -n 1 --backend $backend
    if [ "$status" != 0 ]; then
        refuses 1 'no .*; --backend' generate --backend $backend
        refuses 1 'no .*; --backend' bench --backend $backend
    fi
done
