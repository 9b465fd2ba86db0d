#!/usr/bin/env bash
# Pushes images to the registry in their names, and prints NAME DIGEST of each.
#
# usage: push.sh [--sign-by KEY] IMAGE...
#
#   --sign-by KEY    signs each image (simple signing) with this key of gpg; the signatures go where registries.d says
#                    (containers-registries.d(5): lookaside-staging), which has to be served to clients that pull
#
# Needs buildah, logged in at the registry (`buildah login`).

set -euo pipefail

usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; }
die() {
    echo "push.sh: $*" >&2
    exit 1
}

signing=() images=()
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help) usage && exit 0 ;;
    --sign-by)
        [ $# -gt 1 ] || die '--sign-by: name a key'
        signing=(--sign-by "$2")
        shift
        ;;
    -*) die "no option '$1': see --help" ;;
    *) images+=("$1") ;;
    esac
    shift
done
[ ${#images[@]} -gt 0 ] || die 'name an image: see --help'
command -v buildah >/dev/null || die 'buildah is missing: apt-get install -y buildah'

digest=$(mktemp)
trap 'rm -f "$digest"' EXIT
for image in "${images[@]}"; do
    buildah push --quiet "${signing[@]}" --digestfile "$digest" "$image" >&2
    echo "$image $(cat "$digest")"
done
