#!/usr/bin/env bash
# Builds valkey-server from Debian's source package `valkey`, and packs it into a wheel: the distribution
# `tandem-llm-valkey`, which `tandem up` uses where no redis-server or valkey-server is installed (ADR 91).
#
# usage: build.sh [--out DIR] [--source DIR]
#
#   --out DIR     folder of the wheel (default: dist)
#   --source DIR  an unpacked source package, instead of a download of the newest
#   environment   VALKEY_SUITE, the Debian suite of the source (default: forky; Debian 12 has no Valkey),
#                 TANDEM_KUBE_HOME, where sources and lists of packages are kept
#
# Without TLS, systemd and jemalloc it needs glibc alone. Needs gcc, make, readelf, dpkg-dev, apt; no root. About 80 CPU
# seconds, 5 MB of downloads. Debian verifies the signature of its lists and the hashes of the source.

set -euo pipefail
# shellcheck source=tools/kube/common.sh
. "$(dirname "$(realpath "$0")")/../kube/common.sh"

HERE=$(dirname "$(realpath "$0")")
SUITE=${VALKEY_SUITE:-forky}
out=dist
source=

while [ $# -gt 0 ]; do
    case $1 in
    -h | --help)
        usage
        exit 0
        ;;
    --out) out=${2:?--out needs a folder} && shift ;;
    --source) source=${2:?--source needs a folder} && shift ;;
    *) die "unknown argument '$1': see --help" ;;
    esac
    shift
done

need gcc gcc
need make make
need readelf binutils
need dpkg-source dpkg-dev
out=$(realpath -m "$out")

if [ -z "$source" ]; then
    downloads=$TANDEM_KUBE_HOME/debs/valkey-$SUITE
    source=$TANDEM_KUBE_HOME/src/valkey
    apt_update "$SUITE"
    rm -rf "$downloads" "$source"
    mkdir -p "$downloads" "$(dirname "$source")"
    (cd "$downloads" && apt_in "$SUITE" apt-get source --download-only -qq valkey)
    dpkg-source --no-check -x "$downloads"/valkey_*.dsc "$source" >/dev/null
fi
[ -f "$source/debian/copyright" ] || die "$source is no source package of Debian: it has no debian/copyright"

# No dates and no name of this machine, which its release.c would have, and no paths of it.
export SOURCE_DATE_EPOCH=0
timed 'build valkey-server' make -C "$source/src" -s -j "$(nproc)" OPTIMIZATION=-O2 MALLOC=libc BUILD_TLS=no \
    USE_SYSTEMD=no USE_FAST_FLOAT=no BUILD_LUA=yes CFLAGS="-ffile-prefix-map=$source=." valkey-server >&2
strip --strip-all -o "$source/valkey-server" "$source/src/valkey-server"
"$HERE/wheel.py" "$source/valkey-server" --copyright "$source/debian/copyright" --out "$out"
