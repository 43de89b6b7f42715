# Damaged, foreign and missing files: status 1 and one line that names the file and the cause.
. "$SOURCE_DIR/tests/cli/common.sh"

works synth --preset tiny good
file=good/model.safetensors
header_size=$(od -An -t u8 -N 8 $file | tr -d ' ')
header=$(tail -c +9 $file | head -c "$header_size")

# le64 NUMBER: as 8 little-endian bytes
le64() {
    n=$1
    for _ in 1 2 3 4 5 6 7 8; do
        # shellcheck disable=SC2059
        printf "\\$(printf %03o $((n & 255)))"
        n=$((n >> 8))
    done
}

# container HEADER BYTES: a safetensors file with that header and so many bytes of data
container() {
    le64 ${#1}
    printf %s "$1"
    head -c "$2" /dev/zero
}

# bad NAME PATTERN: loading a model whose model.safetensors comes on stdin must fail and say PATTERN
bad() {
    rm -rf model
    mkdir model
    cp good/config.json model
    cat >model/model.safetensors
    refuses 1 "$2" generate -m model -n 1
    grep -q 'model/model.safetensors' err || fail "$1: the error does not name the file"
}

bad 'empty file' '.' </dev/null
printf 1234567 | bad '7 bytes' '7'
{ le64 1000 && printf '{}'; } | bad 'header beyond the file' '1000'
{ printf '\0\0\0\0\0\0\0\200' && printf '{}'; } | bad 'header of 2^63 bytes' '.'
{ printf '\377\377\377\377\377\377\377\377' && printf '{}'; } | bad 'header of 2^64-1 bytes' '.'
container '{"a": ' 0 | bad 'invalid JSON' '.'
container '[]' 0 | bad 'no object' '.'
one='{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
container "{\"a\":$one,\"a\":$one}" 4 |
    bad 'duplicate names' 'duplicate\|twice'
two='{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
container "{\"a\":$two,\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}" 12 |
    bad 'overlap' 'overlap'
container "{\"a\":$one,\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[8,12]}}" 12 |
    bad 'gap' '.'
container "{\"a\":$two}" 4 | bad 'data too short' '.'
container "{\"a\":$two}" 12 | bad 'data too long' '.'
container '{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}' 8 | bad 'shape against span' 'a'
container '{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}' 4 | bad 'negative shape' '.'
container '{"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,0]}}' 0 |
    bad 'overflowing shape' '.'
container '{"a":{"dtype":"F32","shape":[9223372036854775807,9],"data_offsets":[0,4]}}' 4 |
    bad 'overflowing shape' '.'
container '{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}' 4 | bad 'offsets reversed' '.'
container '{"a":{"dtype":"F32","shape":[1]}}' 4 | bad 'no offsets' 'data_offsets'
printf 'version https://git-lfs.github.com/spec/v1\noid sha256:0e690d30\nsize 548105171\n' |
    bad 'git-lfs pointer' '[Ll][Ff][Ss]'
printf 'PK\003\004\024\000\000\000archive/data.pkl' | bad 'zip' 'zip\|pickle\|PyTorch'
printf '\200\002}q\000(X\001\000\000\000' | bad 'pickle' 'pickle\|PyTorch'

# The good file with one thing changed; names keep their lengths, so offsets stay right.
changed() {
    LC_ALL=C sed "$1" $file
}
changed 's/h\.1\.ln_1\.weight"/h.1.ln_9.weight"/' | bad 'missing tensor' 'h\.1\.ln_1'
changed 's/"dtype":"F32"/"dtype":"I32"/g; s/"dtype": "F32"/"dtype": "I32"/g' | bad 'dtype' 'I32'
head -c $(($(wc -c <$file) - 4)) $file | bad 'truncated' '.'
{ cat $file && printf 'more'; } | bad 'longer than declared' '.'
case $header in *F32*) ;; *) fail "the test's own idea of the header is wrong" ;; esac

# ---- config.json ----
# bad_config NAME PATTERN: the config comes on stdin
bad_config() {
    rm -rf model
    cp -r good model
    cat >model/config.json
    refuses 1 "$2" generate -m model -n 1
    grep -q 'model' err || fail "$1: the error does not name the file"
}
printf '' | bad_config 'empty' 'config.json'
printf '{"n_embd": ' | bad_config 'invalid JSON' 'config.json'
printf '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}' |
    bad_config 'another architecture' '[Ll]lama'
sed 's/"n_embd": *64/"n_embd": 32/' good/config.json | bad_config 'wrong shapes' '.'
sed 's/"n_embd": *64/"n_embd": 63/' good/config.json | bad_config 'heads do not divide' '.'
sed 's/"n_embd": *64/"n_embd": -64/' good/config.json | bad_config 'negative width' 'n_embd'
sed 's/"n_embd": *64/"n_embd": "wide"/' good/config.json | bad_config 'text for a number' 'n_embd'
sed 's/"n_layer": *2/"n_layer": 3/' good/config.json | bad_config 'too few layers' 'h\.2'
rm -rf model
cp -r good model
rm model/config.json
refuses 1 'config.json' generate -m model -n 1

# ---- shards ----
shards() {
    rm -rf model
    mkdir model
    cp good/config.json model
    cp $file model/part.safetensors
    printf '%s' "$1" >model/model.safetensors.index.json
}
shards '{"weight_map": {"wte.weight": "../good/model.safetensors"}}'
refuses 1 'index.json.*\.\.' generate -m model -n 1
shards '{"weight_map": {"wte.weight": "missing.safetensors"}}'
refuses 1 'missing.safetensors' generate -m model -n 1
shards '{"weight_map": {"wte.weight": 5}}'
refuses 1 'index.json' generate -m model -n 1
shards '{"weight_map": '
refuses 1 'index.json' generate -m model -n 1

# ---- tokenizers ----
tokenizer() {
    rm -rf model
    cp -r good model
    printf '%s' "$1" >model/tokenizer.json
}
tokenizer '{"version":"1.0","model":{"type":"WordPiece","vocab":{"a":0}}}'
refuses 1 'tokenizer.json.*WordPiece' generate -m model -n 1
refuses 1 'tokenizer.json.*WordPiece' tokenize -m model
tokenizer '{"model": '
refuses 1 'tokenizer.json' generate -m model -n 1
rm model/tokenizer.json
printf '{"a": 0' >model/vocab.json
printf '#version: 0.2\n' >model/merges.txt
refuses 1 'vocab.json' generate -m model -n 1

# ---- directories and other things ----
mkdir nothing
refuses 1 'nothing' generate -m ./nothing -n 1
refuses 1 'no-such' generate -m ./no-such -n 1
mkdir pickled
cp good/config.json pickled
printf 'PK\003\004' >pickled/pytorch_model.bin
refuses 1 'pytorch_model.bin\|safetensors' generate -m pickled -n 1
mkfifo fifo.safetensors
refuses 1 'fifo.safetensors' generate -m ./fifo.safetensors -n 1
# What is there but cannot be opened is not missing: without its tokenizer a model would load.
for link in vocab.json config.json model.safetensors; do
    rm -rf model
    cp -r good model
    printf '{"a": 0}' >model/vocab.json
    printf '#version: 0.2\n' >model/merges.txt
    for target in nowhere $link; do
        rm model/$link
        ln -s $target model/$link
        refuses 1 "model/$link: cannot open" generate -m model -n 1 --ids 1
        [ $link != vocab.json ] || refuses 1 "model/$link: cannot open" tokenize -m model
    done
done
ln -s nowhere dangling
refuses 1 'dangling: cannot open: No such file' generate -m ./dangling
# Root may read everything, so that it has to become somebody else.
user=
[ "$(id -u)" != 0 ] || user='setpriv --reuid=65534 --regid=65534 --clear-groups'
chmod 755 .
# shellcheck disable=SC2086
if $user "$bml" --version >/dev/null 2>&1; then
    rm -rf model
    cp -r good model
    printf '{"a": 0}' >model/vocab.json
    printf '#version: 0.2\n' >model/merges.txt
    chmod 000 model
    for command in 'generate -m model -n 1' 'tokenize -m model' 'score -m model --ids 1,2' \
        'inspect model'; do
        status=0
        $user "$bml" $command >out 2>err </dev/null || status=$?
        check_refusal 1 'model.*Permission denied' "an unreadable directory: $command"
    done
    chmod 755 model
else
    echo "an unreadable directory is not tested: root cannot be anybody else here"
fi

# ---- names that do not fit a line ----
long=$(head -c 5000 /dev/zero | tr '\0' n)
container "{\"$long\":$two,\"wte.weight\":$two}" 8 | bad 'a long name' 'overlap at byte'
container "{\"a\\u0085b\\u2028c\\n\":$two,\"b\":$two}" 8 | bad 'line ends in a name' '"a??b???c?"'
refuses 1 'cannot open: File name too long' generate -m "./$long"
refuses 1 'cannot open: File name too long' generate -f "$long"
refuses 1 'a??b???c?: no such' generate -m "$(printf 'a\302\205b\342\200\250c\377')"
HF_HOME=$work/empty-cache HF_HUB_CACHE=$work/empty-cache
export HF_HOME HF_HUB_CACHE
refuses 1 'no-such-org/no-such-model' generate -m no-such-org/no-such-model -n 1
