# Sourced by every test: sh test_NAME.sh BML, with SOURCE_DIR, SHARED_DIR and TEST_DATA set. The
# test runs in a directory of its own that is removed at the end.
# shellcheck shell=sh
set -eu
program=$1
# shellcheck disable=SC2034
here=$SOURCE_DIR/tests/cli
work=$(mktemp -d "${TMPDIR:-/tmp}/bml-test.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"

# The program on the CPU, whatever else this machine has: same bits and memory are its promises. A
# test that names another backend gets that.
bml=$work/.bml
cat >"$bml" <<END
#!/bin/sh
case \${1-} in
generate | score | logits | bench)
    command=\$1
    shift
    exec "$program" "\$command" --backend cpu "\$@"
    ;;
esac
exec "$program" "\$@"
END
chmod +x "$bml"

fail() {
    echo "FAIL: $*" >&2
    [ ! -s err ] || { echo "--- its standard error:" >&2 && head -c 3000 err >&2; }
    exit 1
}

# run ARGUMENTS: runs bml; leaves its exit status in $status, its output in the files out and err.
run() {
    status=0
    "$bml" "$@" >out 2>err || status=$?
}

# works ARGUMENTS: bml must succeed.
works() {
    run "$@"
    [ "$status" = 0 ] || fail "bml $* ended with status $status"
}

# check_refusal STATUS PATTERN WHAT: the last run must have ended with STATUS and exactly one line
# on standard error that matches PATTERN (a basic regular expression), and
# nothing on standard output.
check_refusal() {
    [ "$status" = "$1" ] || fail "$3 ended with status $status instead of $1"
    [ "$(wc -l <err)" -eq 1 ] || fail "$3 gave $(wc -l <err) lines on standard error instead of 1"
    grep -q -e "$2" err || fail "$3: the error does not say: $2"
    [ ! -s out ] || fail "$3 wrote to standard output"
}

# refuses STATUS PATTERN ARGUMENTS
refuses() {
    want=$1 pattern=$2
    shift 2
    run "$@" </dev/null
    check_refusal "$want" "$pattern" "bml $*"
}

# output_matches PATTERN WHAT: the file out must be one line that matches an extended expression.
output_matches() {
    [ "$(wc -l <out)" -eq 1 ] || fail "$2 is not one line"
    grep -Eqx -e "$1" out || { head -c 2000 out >&2 && fail "$2 does not look like $1"; }
}

# A build with AddressSanitizer has other memory needs.
sanitized() {
    grep -q __asan_init "$program"
}

# ids N: N token ids below 500, always the same
ids() {
    awk "BEGIN { for (i = 0; i < $1; i++) printf \"%d \", (i * 37 + i * i % 11) % 500 }"
}

number='-?[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?'
integers='\[([0-9]+(, [0-9]+)*)?\]'
