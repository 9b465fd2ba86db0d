#!/usr/bin/env bash
# Unpacks what `make test-neighbours` runs beside the control plane (tools/kube/setup.sh): Debian's Prometheus and its registry of
# OCI artefacts. Nothing is installed into the system; a second run ends at once.
#
#   TANDEM_NEIGHBOURS_HOME=DIR     where they go (default ~/.cache/tandem-neighbours)

set -euo pipefail

home=$(realpath -m "${TANDEM_NEIGHBOURS_HOME:-$HOME/.cache/tandem-neighbours}")
suite=bookworm
programs=(prometheus promtool docker-registry)

# Packages are kept where these functions keep theirs, but in our own folder.
TANDEM_KUBE_HOME=$home
# shellcheck source=tools/kube/common.sh
. "$(dirname "$(realpath "$0")")/../kube/common.sh"

case ${1:-} in '') ;; -h | --help) usage && exit 0 ;; *) die "takes no arguments: see --help" ;; esac

missing=no
for program in "${programs[@]}"; do [ -x "$home/bin/$program" ] || missing=yes; done
[ "$missing" = yes ] || exit 0
need dpkg-deb dpkg
timed "prometheus and docker-registry of Debian $suite" unpack_debs "$suite" prometheus docker-registry
mkdir -p "$home/bin"
for program in "${programs[@]}"; do mv "$home/sysroot/usr/bin/$program" "$home/bin/"; done
rm -rf "$home/apt" "$home/debs" "$home/sysroot"
say "ready: $home/bin"
