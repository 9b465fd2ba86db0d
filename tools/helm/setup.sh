#!/usr/bin/env bash
# Keeps the Helm library (PyPI helm-sdkpy, which needs Python 3.12 or newer) ready in a cache folder, for the tests of the
# charts. A second run finds it and ends at once. Nothing is installed into the system.
#
#   TANDEM_HELM_HOME=DIR       where it goes (default ~/.cache/tandem-helm); DIR/python runs tools/helm/helm.py
#   TANDEM_HELM_PYTHON=PYTHON  an interpreter to use; without it: python3.14, 3.13 or 3.12 of the PATH, or else that of
#                              Debian 13, unpacked into DIR and run with its own C library
#   PIP="python3 -m pip"       the pip that downloads the wheels; its own Python may be older

set -euo pipefail

home=$(realpath -m "${TANDEM_HELM_HOME:-$HOME/.cache/tandem-helm}")
version=0.1.32
suite=trixie
# What the interpreter, its modules that matter here and the library load.
debs=(python3.13-minimal libpython3.13-minimal libpython3.13-stdlib libc6 libssl3t64 libzstd1 zlib1g libexpat1 libffi8
    libbz2-1.0 liblzma5 libuuid1)

# Packages of another suite are kept where these functions keep theirs, but in our own folder.
TANDEM_KUBE_HOME=$home
# shellcheck source=tools/kube/common.sh
. "$(dirname "$(realpath "$0")")/../kube/common.sh"

case ${1:-} in '') ;; -h | --help) usage && exit 0 ;; *) die "takes no arguments: see --help" ;; esac

stamp=$home/ready
want="$version $(sha256sum "$0" | cut -d' ' -f1)"
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && exit 0

suits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; }

# Unpacks Debian's interpreter and prints the words that start it: loader, its libraries, the program.
unpack_python() {
    local loader program=$home/sysroot/usr/bin/python3.13
    need dpkg-deb dpkg
    unpack_debs "$suite" "${debs[@]}" >&2
    rm -rf "$home/apt" "$home/debs"
    loader=$(find "$home/sysroot/usr/lib" -name 'ld-linux*.so.*' -print -quit)
    printf '%s --library-path %s --argv0 %s %s' "$loader" "$(dirname "$loader")" "$program" "$program"
}

mkdir -p "$home"
interpreter=
for candidate in ${TANDEM_HELM_PYTHON:-python3.14 python3.13 python3.12 python3}; do
    if suits "$candidate"; then interpreter=$(command -v "$candidate") && break; fi
done
if [ -z "$interpreter" ]; then
    [ -z "${TANDEM_HELM_PYTHON:-}" ] || die "TANDEM_HELM_PYTHON=$TANDEM_HELM_PYTHON is no Python 3.12 or newer"
    say "no Python 3.12 or newer here: unpacking that of Debian $suite into $home"
    interpreter=$(unpack_python)
fi
printf '#!/bin/sh\n# Runs Python with the Helm library.\nPYTHONPATH=%s exec %s "$@"\n' "$home/site" "$interpreter" >"$home/python"
chmod +x "$home/python"

# The pip at hand may be of an older Python: the option names the one to download for.
series=$("$home/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
say "installing helm-sdkpy $version for Python $series"
rm -rf "$home/site"
${PIP:-python3 -m pip} --disable-pip-version-check install --quiet --target "$home/site" --python-version "$series" \
    --ignore-requires-python --only-binary=:all: "helm-sdkpy==$version"
"$home/python" -c 'import helm_sdkpy'
printf '%s\n' "$want" >"$stamp"
say "ready: $home"
