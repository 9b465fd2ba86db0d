#!/usr/bin/env bash
# Builds what the tests against a real control plane need, and only what is missing; a second run does nothing.
# State is in $TANDEM_KUBE_HOME (~/.cache/tandem-kube); of it only bin/ (0.5 GB) is used afterwards.
#
# usage: setup.sh            about 15 CPU minutes and 260 MB of downloads the first time

set -euo pipefail
# shellcheck source=tools/kube/common.sh
. "$(dirname "$(realpath "$0")")/common.sh"

case ${1:-} in '') ;; -h | --help) usage && exit 0 ;; *) die "takes no arguments: see --help" ;; esac

missing=()
command -v openssl >/dev/null || missing+=(openssl)
if [ ! -x "$BIN/kubectl" ] || [ ! -x "$BIN/crdserver" ]; then
    command -v dpkg-source >/dev/null || missing+=(dpkg-dev)
    python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3 python3-venv)
fi
if [ ${#missing[@]} -gt 0 ]; then
    [ "$(id -u)" = 0 ] || die "missing ${missing[*]}: run 'sudo apt-get install ${missing[*]}' and try again"
    command -v apt-get >/dev/null || die "missing ${missing[*]} and no apt-get: install them and try again"
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
fi
"$TOOLS/build_control_plane.sh"
"$TOOLS/build_crd_engine.sh"
