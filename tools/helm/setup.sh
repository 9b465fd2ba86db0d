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

say() { printf 'helm: %s\n' "$*"; }
fail() { printf 'helm: %s\n' "$*" >&2; exit 1; }

stamp=$home/ready
want="$version $(sha256sum "$0" | cut -d' ' -f1)"
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && exit 0

suits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; }

# The Debian mirror that this system itself uses.
mirror() {
    # shellcheck disable=SC2016  # $(...) is apt's own format syntax
    apt-get indextargets --no-release-info --format '$(CREATED_BY) $(COMPONENT) $(REPO_URI)' |
        awk '$1 == "Packages" && $2 == "main" && $3 ~ /\/debian\/?$/ { print $3; exit }'
}

# apt_alone COMMAND...: apt with a state of its own, so that packages of another suite never reach the system.
apt_alone() {
    local state=$home/apt
    mkdir -p "$state"/{lists/partial,cache/archives/partial,sources.d}
    : >"$state/status"
    printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: %s\n' "$(mirror)" "$suite" \
        /usr/share/keyrings/debian-archive-keyring.gpg >"$state/sources.d/$suite.sources"
    cat >"$state/apt.conf" <<CONF
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "$state/sources.d/";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::State "$state";
Dir::State::lists "$state/lists";
Dir::State::status "$state/status";
Dir::Cache "$state/cache";
Debug::NoLocking "true";
APT::Sandbox::User "root";
CONF
    APT_CONFIG=$state/apt.conf "$@"
}

# Unpacks Debian's interpreter and prints the words that start it: loader, its libraries, the program.
unpack_python() {
    local root=$home/debian loader
    command -v dpkg-deb >/dev/null || fail "no Python 3.12 and no dpkg to unpack one: set TANDEM_HELM_PYTHON"
    [ -n "$(mirror)" ] || fail "no Debian mirror among apt's sources: set TANDEM_HELM_PYTHON to a Python 3.12 or newer"
    mkdir -p "$home/debs"
    apt_alone apt-get update -qq >&2
    (cd "$home/debs" && apt_alone apt-get download -qq "${debs[@]}" >&2)
    rm -rf "$root"
    for deb in "$home"/debs/*.deb; do dpkg-deb -x "$deb" "$root"; done
    rm -rf "$home/apt" "$home/debs"
    loader=$(find "$root/usr/lib" -name 'ld-linux*.so.*' -print -quit)
    printf '%s --library-path %s --argv0 %s %s' "$loader" "$(dirname "$loader")" "$root/usr/bin/python3.13" \
        "$root/usr/bin/python3.13"
}

mkdir -p "$home"
interpreter=
for candidate in ${TANDEM_HELM_PYTHON:-python3.14 python3.13 python3.12 python3}; do
    if suits "$candidate"; then interpreter=$(command -v "$candidate") && break; fi
done
if [ -z "$interpreter" ]; then
    [ -z "${TANDEM_HELM_PYTHON:-}" ] || fail "TANDEM_HELM_PYTHON=$TANDEM_HELM_PYTHON is no Python 3.12 or newer"
    say "no Python 3.12 or newer here: unpacking that of Debian $suite into $home"
    interpreter=$(unpack_python)
fi
printf '#!/bin/sh\n# Runs Python with the Helm library.\nPYTHONPATH=%s exec %s "$@"\n' "$home/site" "$interpreter" >"$home/python"
chmod +x "$home/python"

# The pip at hand may be of an older Python: it is told for which one it downloads.
series=$("$home/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
say "installing helm-sdkpy $version for Python $series"
rm -rf "$home/site"
${PIP:-python3 -m pip} --disable-pip-version-check install --quiet --target "$home/site" --python-version "$series" \
    --ignore-requires-python --only-binary=:all: "helm-sdkpy==$version"
"$home/python" -c 'import helm_sdkpy'
printf '%s\n' "$want" >"$stamp"
say "ready: $home"
