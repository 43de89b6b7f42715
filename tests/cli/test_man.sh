# Every option that a --help names stands in the manual page, and the page is well-formed.
. "$SOURCE_DIR/tests/cli/common.sh"
page=$SOURCE_DIR/man/bml.1

for command in generate score logits tokenize detokenize bench inspect synth; do
    grep -q "^\.It Cm $command\$" "$page" || fail "man/bml.1 does not describe $command"
    works "$command" --help
    sed -n 's/^  \(-\(.\),\)\{0,1\} *--\([a-z-]*\).*/\2 \3/p' out >options
    [ -s options ] || fail "$command --help lists no options"
    while read -r letter name; do
        [ -n "$name" ] || { name=$letter && letter=; }
        grep -q -e "Fl -$name\( \|\$\)" "$page" ||
            fail "man/bml.1 does not have --$name of bml $command"
        [ -z "$letter" ] || grep -q -e "Fl $letter .*Fl -$name\|Fl $letter\$" "$page" ||
            fail "man/bml.1 does not have -$letter of bml $command"
    done <options
done

if command -v mandoc >/dev/null; then
    mandoc -Tlint -Wwarning "$page" >err || fail "mandoc finds fault with man/bml.1"
fi
