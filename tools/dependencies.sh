#!/bin/sh
# Makes sure that what a build needs is installed: sh dependencies.sh build|tests|fuzz|metal|portability
# Installs missing packages with apt or brew where it can; where it cannot, prints the exact command
# and stops.
set -eu
purpose=${1:-build}

works() { # does the command run?
    "$@" >/dev/null 2>&1
}

missing= before=
need() { # need DEBIAN-PACKAGE BREW-PACKAGE TEST...
    debian=$1 brew=$2
    shift 2
    works "$@" || if [ "$system" = brew ]; then missing="$missing $brew"; else missing="$missing $debian"; fi
}

if works apt-get --version; then
    system=apt
elif works brew --version; then
    system=brew
else
    system=none
fi

# On Debian a compiler only recommends the C library's headers.
need "gcc libc6-dev" gcc sh -c 'echo "#include <stdio.h>" | cc -E -'
need make make make --version
need cmake cmake cmake --version
need pkg-config pkgconf pkg-config --version
need libjansson-dev jansson pkg-config --atleast-version=2.12 jansson
if [ "$purpose" != build ]; then
    need libcmocka-dev cmocka pkg-config --exists cmocka
    need xz-utils xz xz --version
fi
if [ "$purpose" = fuzz ] || [ "$purpose" = metal ]; then
    need clang llvm clang --version
    if [ "$system" = apt ] && works clang --version; then
        runtime=$(clang -print-file-name=libclang_rt.fuzzer-x86_64.a)
        [ -e "$runtime" ] || [ -e "$(dirname "$runtime")/../$(uname -s | tr 'A-Z' 'a-z')/libclang_rt.fuzzer.a" ] ||
            missing="$missing libclang-rt-$(clang -dumpversion | cut -d. -f1)-dev"
    elif [ "$system" = apt ]; then
        missing="$missing libclang-rt-14-dev"
    fi
fi
if [ "$purpose" = metal ]; then # Objective-C's runtime
    need gobjc - sh -c 'echo "int main(void) { return 0; }" | clang -x c - -lobjc -o /dev/null'
fi
if [ "$purpose" = portability ]; then
    if [ "$system" != apt ] || [ "$(uname -m)" != x86_64 ]; then
        echo "make portability needs Debian on x86-64: it cross-builds with Debian's packages" >&2
        exit 1
    fi
    arm=aarch64-linux-gnu
    need "gcc-$arm libc6-dev-arm64-cross" - sh -c "echo '#include <stdio.h>' | $arm-gcc -E -"
    need qemu-user-static - qemu-aarch64-static --version
    for library in jansson cmocka; do
        need lib$library-dev:arm64 - test -e /usr/lib/$arm/pkgconfig/$library.pc
    done
fi
[ -n "$missing" ] || exit 0

case $system in
apt)
    as_root=
    [ "$(id -u)" = 0 ] || as_root=sudo
    command="$as_root apt-get install -y --no-install-recommends$missing"
    [ "$purpose" != portability ] || before="$as_root dpkg --add-architecture arm64"
    echo "installing missing packages:$missing"
    if [ -z "$as_root" ] || works sudo -n true; then
        export DEBIAN_FRONTEND=noninteractive
        # shellcheck disable=SC2086
        if { ${before:-true} && $as_root apt-get update -qq && $command; } >/tmp/bml-packages.$$ 2>&1; then
            rm -f /tmp/bml-packages.$$
            exit 0
        fi
        cat /tmp/bml-packages.$$ >&2
        rm -f /tmp/bml-packages.$$
    fi
    ;;
brew)
    command="brew install$missing"
    echo "installing missing packages:$missing"
    # shellcheck disable=SC2086
    $command && exit 0
    ;;
*)
    command="your package manager for:$missing"
    ;;
esac
echo "Packages are missing and could not be installed from here. Please run:" >&2
echo "    ${before:+$before && $as_root apt-get update && }$command" >&2
exit 1
