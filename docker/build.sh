#!/bin/sh
# Builds Tandem's images with docker, podman or buildah, whichever is there.
#
# usage: docker/build.sh [--push] [TARGET...]     targets of docker/Dockerfile; default: all but engine-cuda
#        docker/build.sh --names [TARGET...]      only print the names of their images
#
#   TANDEM_REGISTRY        (default ghcr.io/tandem-serving) images are REGISTRY/engine:VERSION and so on; the CUDA build
#                          of the engine has the tag VERSION-cuda
#   TANDEM_VERSION         (default: that of pyproject.toml)
#   TANDEM_CONTAINER_TOOL  docker, podman or buildah
#   TANDEM_BUILD_ARGS      more words for the build, e.g. "--platform linux/arm64"
#   TANDEM_PIP_CONF        a pip.conf to build with, e.g. for a mirror; it does not get into the images
#   SOURCE_DATE_EPOCH      date of all files and of the image (default: that of the Dockerfile). With podman and buildah two
#                          builds of the same inputs are equal, digest included; docker keeps dates of its own
set -eu
cd "$(dirname "$0")/.."

fail() { echo "build.sh: $1" >&2; exit 1; }

works() {
    command -v "$1" >/dev/null || return 1
    # A docker client without its daemon builds nothing.
    "$1" info >/dev/null 2>&1
}

action=build
case ${1:-} in
--push) action=push && shift ;;
--names) action=names && shift ;;
-*) fail "no option '$1': --push or --names" ;;
esac

tool=${TANDEM_CONTAINER_TOOL:-}
if [ "$action" = names ]; then tool=none; fi
if [ -z "$tool" ]; then
    for candidate in docker podman buildah; do
        if works "$candidate"; then tool=$candidate && break; fi
    done
fi
[ -n "$tool" ] || fail "no docker, podman or buildah that works here (docker/README.md: images without any of them)"

[ $# -gt 0 ] || set -- engine-cpu services operator redis

registry=${TANDEM_REGISTRY:-ghcr.io/tandem-serving}
version=${TANDEM_VERSION:-$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)}
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
epoch=${SOURCE_DATE_EPOCH:-$(sed -n 's/^ARG SOURCE_DATE_EPOCH=//p' docker/Dockerfile | head -n 1)}
case $tool in docker) dates= ;; *) dates="--timestamp $epoch" ;; esac

for target in "$@"; do
    case $target in
    engine-cpu) name=$registry/engine:$version ;;
    engine-cuda) name=$registry/engine:$version-cuda ;;
    services | operator | redis) name=$registry/$target:$version ;;
    *) fail "no target '$target': engine-cpu, engine-cuda, services, operator, redis" ;;
    esac
    echo "$name"
    if [ "$action" = names ]; then continue; fi
    # shellcheck disable=SC2086 # words of their own
    DOCKER_BUILDKIT=1 "$tool" build --file docker/Dockerfile --target "$target" --tag "$name" \
        --build-arg "VERSION=$version" --build-arg "REVISION=$revision" \
        --build-arg "SOURCE_DATE_EPOCH=$epoch" $dates \
        ${TANDEM_PIP_CONF:+--secret "id=pip.conf,src=$TANDEM_PIP_CONF"} ${TANDEM_BUILD_ARGS:-} .
    if [ "$action" = push ]; then "$tool" push "$name"; fi
done
