#!/usr/bin/env bash
# Builds Tandem's images from docker/Dockerfile without a container engine and without a registry, as archives for the
# node of node.py: debootstrap makes the Debian that the Dockerfile begins with, buildah carries out its steps.
#
# usage: build_images.sh [TARGET...]       (default: engine-cpu services operator redis)
#        build_images.sh --base            only the Debian, in buildah's default storage: for tools/release/images.sh
#
#   images    localhost/tandem/engine:e2e (and services, operator, redis), in $TANDEM_KUBE_HOME/images; engine-cuda, which
#             no node here can run, is localhost/tandem/engine:e2e-cuda in buildah's storage alone (20 GB free, for a while)
#   pip       the configuration of PYTHON (.venv/bin/python) holds inside, too: local indices, find-links, certificate
#
# Needs root and setup_node.sh done. The first time takes minutes; then layers whose inputs are the same are kept.

set -euo pipefail
# shellcheck source=tools/kube/common.sh
. "$(dirname "$(realpath "$0")")/common.sh"

REPOSITORY=$(realpath "$TOOLS/../..")
IMAGES=$TANDEM_KUBE_HOME/images
BASE=localhost/tandem-debian:bookworm
TAG=e2e
PYTHON=${PYTHON:-$REPOSITORY/.venv/bin/python}
export PATH=$PATH:/usr/sbin:/sbin

# A storage of our own. Isolation by chroot needs no runtime; no limit of files above the hard one of this shell.
buildah() {
    command buildah --root "$TANDEM_KUBE_HOME/containers/storage" --runroot "$TANDEM_KUBE_HOME/containers/run" \
        --storage-driver overlay "$@"
}
have_image() { buildah inspect --type image "$1" >/dev/null 2>&1; }

# What docker's debian image is made from, too, and like there nothing starts services while packages are installed.
make_base() ( # a shell of its own, for its trap
    local rootfs container
    rootfs=$(mktemp -d "$TANDEM_KUBE_HOME/rootfs.XXXXXX")
    # shellcheck disable=SC2064  # the directory of now
    trap "rm -rf --one-file-system '$rootfs'" EXIT
    debootstrap --variant=minbase bookworm "$rootfs" "$(debian_mirror)" >"$TANDEM_KUBE_HOME/debootstrap.log" 2>&1 ||
        die "debootstrap failed: see $TANDEM_KUBE_HOME/debootstrap.log"
    rm -rf "${rootfs:?}"/var/cache/apt/archives/*.deb "${rootfs:?}"/var/lib/apt/lists/* "${rootfs:?}"/{dev,proc,sys}/*
    printf '#!/bin/sh\nexit 101\n' >"$rootfs/usr/sbin/policy-rc.d"
    chmod 0755 "$rootfs/usr/sbin/policy-rc.d"
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$rootfs" / >/dev/null
    buildah commit --quiet --rm "$container" "$BASE" >/dev/null
)

make_pause() {
    local container
    container=$(buildah from scratch)
    buildah copy --quiet "$container" "$BIN/pause" /pause >/dev/null
    buildah config --entrypoint '["/pause"]' "$container"
    buildah commit --quiet --rm "$container" localhost/pause:1 >/dev/null
}

name_of() {
    case $1 in
    engine-cuda) echo "localhost/tandem/engine:$TAG-cuda" ;;
    engine-cpu) echo "localhost/tandem/engine:$TAG" ;;
    *) echo "localhost/tandem/$1:$TAG" ;;
    esac
}

# save NAME: as an archive, unless the one that is there is of the same image.
save() {
    local archive id
    archive=$IMAGES/$(tr '/:' '__' <<<"$1").tar
    id=$(buildah inspect --type image --format '{{.FromImageID}}' "$1")
    [ -f "$archive" ] && [ "$(cat "$archive.id" 2>/dev/null)" = "$id" ] && return
    rm -f "$archive.id"
    # Uncompressed: it is read once, on this machine.
    rm -f "$archive.part"
    buildah push --quiet --disable-compression "$1" "oci-archive:$archive.part:$1"
    mv "$archive.part" "$archive"
    echo "$id" >"$archive.id"
}

build() {
    local target=$1 files
    mapfile -t files < <("$PYTHON" "$TOOLS/pip_settings.py" "$TANDEM_KUBE_HOME/pip.conf")
    buildah bud --quiet --layers --isolation chroot --pull-never --ulimit "nofile=$(ulimit -Hn):$(ulimit -Hn)" \
        --file "$REPOSITORY/docker/Dockerfile" --target "$target" --tag "$(name_of "$target")" \
        --build-arg "DEBIAN=$BASE" --secret "id=pip.conf,src=$TANDEM_KUBE_HOME/pip.conf" \
        "${files[@]/#/--volume=}" "$REPOSITORY" >"$TANDEM_KUBE_HOME/build-$target.log" 2>&1 ||
        die "$target was not built: see $TANDEM_KUBE_HOME/build-$target.log"
}

case ${1:-} in -h | --help) usage && exit 0 ;; esac
[ "$(id -u)" = 0 ] || die 'root is needed'
if [ "${1:-}" = --base ]; then
    need buildah buildah
    need debootstrap debootstrap
    buildah() { command buildah "$@"; }
    mkdir -p "$TANDEM_KUBE_HOME"
    have_image "$BASE" || timed 'Debian by debootstrap' make_base
    exit
fi
[ $# -gt 0 ] || set -- engine-cpu services operator redis
mkdir -p "$IMAGES"

have_image "$BASE" || timed 'Debian by debootstrap' make_base
have_image localhost/pause:1 || make_pause
save localhost/pause:1
for target in "$@"; do
    timed "image $target" build "$target"
    [ "$target" = engine-cuda ] || timed "archive of $target" save "$(name_of "$target")"
done
