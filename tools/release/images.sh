#!/usr/bin/env bash
# Builds the images of a release with buildah, proves that a second build is equal, and writes a bill of materials of each.
#
# usage: images.sh FOLDER [--twice] [--push] [--sign-by KEY] [TARGET...]
#
#   TARGET                     of docker/Dockerfile; default: all. engine-cuda needs 30 GB of disk, with --twice 37, and an
#                              index with CUDA wheels
#
#   FOLDER/images.txt          NAME IMAGE-ID and, with --push, the digest that the registry has
#   FOLDER/TARGET.cdx.json     CycloneDX 1.6: packages of Debian and of Python
#   --twice                    builds each image twice without a cache, and fails if the two differ
#   --push                     pushes to $TANDEM_REGISTRY (docker/build.sh), with the credentials of `buildah login`
#   --sign-by KEY              with --push: signs the images with this key of gpg (push.sh)
#
# Variables of docker/build.sh apply. Needs root or a user namespace (buildah unshare), and cyclonedx-python-lib in PYTHON
# (.venv/bin/python).

set -euo pipefail
cd "$(dirname "$(realpath "$0")")/../.."

usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; }
die() {
    echo "images.sh: $*" >&2
    exit 1
}

python=$(realpath -s "${PYTHON:-.venv/bin/python}")
twice=no push=no signing=() targets=() folder=
while [ $# -gt 0 ]; do
    word=$1
    shift
    case $word in
    -h | --help) usage && exit 0 ;;
    --twice) twice=yes ;;
    --push) push=yes ;;
    --sign-by)
        [ $# -gt 0 ] || die '--sign-by: name a key'
        signing=(--sign-by "$1")
        shift
        ;;
    -*) die "no option '$word': see --help" ;;
    *) if [ -z "$folder" ]; then folder=$word; else targets+=("$word"); fi ;;
    esac
done
[ -n "$folder" ] || die 'name a folder: see --help'
[ ${#signing[@]} -eq 0 ] || [ "$push" = yes ] || die '--sign-by is about images in a registry: add --push'
command -v buildah >/dev/null || die 'buildah is missing: apt-get install -y buildah'
[ ${#targets[@]} -gt 0 ] || targets=(engine-cpu engine-cuda services operator redis)
export TANDEM_CONTAINER_TOOL=buildah

# Before the first image: a disk that is full in the last steps of an hour has failed other programs too.
CUDA_GB=30
# The second build begins when the first image is there.
[ "$twice" = no ] || CUDA_GB=37
case " ${targets[*]} " in *' engine-cuda '*)
    store=$(buildah info --format '{{.store.GraphRoot}}')
    there=$(df --output=avail -B 1G "$store" | tail -n 1)
    [ "$there" -ge "$CUDA_GB" ] ||
        die "engine-cuda needs $CUDA_GB GB of disk and $store has $((there)): free some, or name the other targets"
    ;;
esac
mkdir -p "$folder"
folder=$(realpath "$folder")

id_of() { buildah inspect --type image --format '{{.FromImageID}}' "$1"; }

# build TARGET: sets id to that of its image.
build() {
    docker/build.sh "$1" >"$folder/$1.log" 2>&1 || die "$1 was not built: see $folder/$1.log"
    id=$(id_of "$name")
}

container=
trap '[ -z "$container" ] || buildah rm "$container" >/dev/null' EXIT
: >"$folder/images.txt.part"
for target in "${targets[@]}"; do
    name=$(docker/build.sh --names "$target")
    build "$target"
    if [ "$twice" = yes ]; then
        first=$id
        TANDEM_BUILD_ARGS="--no-cache ${TANDEM_BUILD_ARGS:-}" build "$target"
        [ "$first" = "$id" ] || die "two builds of $target differ: $first and $id"
    fi
    digest=
    if [ "$push" = yes ]; then
        digest=$(tools/release/push.sh "${signing[@]}" "$name")
        digest=${digest##* }
    fi
    container=$(buildah from --pull-never "$name")
    root=$(buildah mount "$container")
    tag=${name##*:} repository=${name%:*}
    "$python" tools/release/sbom.py "$root" --name "${repository##*/}" --version "$tag" --digest "${digest:-sha256:$id}" \
        >"$folder/$target.cdx.json"
    buildah rm "$container" >/dev/null
    container=
    echo "$name sha256:$id${digest:+ $digest}" | tee -a "$folder/images.txt.part"
done
mv "$folder/images.txt.part" "$folder/images.txt"
