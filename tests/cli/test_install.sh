# The installed tree: only bml_* is exported, hello.c builds against it, the built-in model is
# found.
. "$SOURCE_DIR/tests/cli/common.sh"
if sanitized; then
    echo "skipped: programs of a build with sanitizers need their runtime"
    exit 0
fi
build=$(dirname "$program")
prefix=$work/prefix
cmake --install "$build" --prefix "$prefix" >log 2>&1 || { cat log >&2 && fail "cmake --install"; }
lib=$(dirname "$(find "$prefix" -name libbml.a)")
for file in bin/bml include/bml.h share/man/man1/bml.1 share/bml/models/storyteller/config.json; do
    [ -s "$prefix/$file" ] || fail "$file is not installed"
done
[ "$(find "$prefix/include" -type f | wc -l)" -eq 1 ] || fail "more than one header is installed"
[ -s "$lib/pkgconfig/bml.pc" ] || fail "bml.pc is not installed"

# Symbols; macOS puts an underscore in front of every name, C++ a _Z and the length.
strangers() {
    awk 'NF >= 3 && $(NF - 1) != "U" { print $NF }' | sed 's/@.*//' | grep -Ev '^(_|_Z[0-9]+)?bml_' || :
}
nm -g "$lib/libbml.a" 2>/dev/null | strangers >names
[ ! -s names ] || fail "libbml.a has symbols that are not bml_*: $(head -5 names | tr '\n' ' ')"
if [ -e "$lib/libbml.so" ]; then
    nm -D --defined-only "$lib/libbml.so" | strangers >names
    [ ! -s names ] || fail "libbml.so exports $(head -5 names | tr '\n' ' ')"
    # What the header declares is there, and nothing else.
    nm -D --defined-only "$lib/libbml.so" | awk '{ print $NF }' | grep '^bml_' | sort >exported
    sed -n 's/^BML_API.*[ *]\(bml_[a-z_0-9]*\)(.*/\1/p' "$prefix/include/bml.h" | sort >declared
    [ -s declared ] || fail "no declarations found"
    cmp -s exported declared || { diff exported declared >&2 || fail "exports differ from bml.h"; }
fi

# From elsewhere, with another home: the model next to the program.
installed() { (cd / && env HOME="$work/home" "$prefix/bin/bml" "$@"); }
installed generate -p 'Once upon a time' -n 8 -q >out 2>err || fail "installed bml does not run"
[ -s out ] || fail "the installed program says nothing"
installed inspect --json >out 2>err || fail "inspect of the installed model"
grep -q "\"path\": \"$(cd "$prefix" && pwd -P)" out || grep -q "\"path\": \"$prefix" out ||
    fail "the built-in model does not come from the installed tree"

# hello.c through pkg-config, with the shared and with the static library.
PKG_CONFIG_PATH=$lib/pkgconfig
export PKG_CONFIG_PATH
cp "$SOURCE_DIR/examples/hello.c" .
# The tree lies elsewhere than where the build was configured for; bml.pc must not mind.
flags() { pkg-config "$@" bml; }
same_directory() { [ "$(cd "$1" && pwd -P)" = "$(cd "$2" && pwd -P)" ]; }
for variable in prefix includedir libdir; do
    case $variable in
    prefix) want=$prefix ;;
    includedir) want=$prefix/include ;;
    libdir) want=$lib ;;
    esac
    same_directory "$(pkg-config --variable=$variable bml)" "$want" ||
        fail "bml.pc: $variable is $(pkg-config --variable=$variable bml), not $want"
done
# shellcheck disable=SC2046
${CC:-cc} -std=c11 -Wall -Wextra -Werror hello.c $(flags --cflags --libs) -Wl,-rpath,"$lib" \
    -o hello ||
    fail "hello.c does not build with the shared library"
(cd / && "$work/hello" 'Once upon a time') >out 2>err || fail "hello does not run"
grep -q '^Once upon a time.' out || fail "hello tells no story"
# shellcheck disable=SC2046
${CC:-cc} -std=c11 hello.c $(flags --cflags) "$lib/libbml.a" \
    $(flags --static --libs | sed 's/-lbml //') -o hello_static || fail "hello.c does not build with the static library"
mv out shared_out
./hello_static 'Once upon a time' >out 2>err || fail "hello_static does not run"
cmp -s out shared_out || fail "the static and the shared library differ"

# A C++ program can include the header.
if command -v c++ >/dev/null; then
    printf '#include <bml.h>\nint main() { return bml_version() == nullptr; }\n' >plus.cc
    # shellcheck disable=SC2046
    c++ plus.cc $(flags --cflags --libs) -Wl,-rpath,"$lib" -o plus || fail "C++ cannot use bml.h"
    ./plus || fail "a C++ program with bml.h does not run"
fi
