#!/usr/bin/env bash
# Installs and builds what a real node needs (node.py) beside the control plane (setup.sh), and only what is missing:
# kubelet and kube-proxy, containerd with runc and the CNI plugins, and what builds images. Needs root for the latter.
#
# usage: setup_node.sh       about 2 CPU minutes and 100 MB of downloads the first time
#
# iproute2, iptables, debootstrap and buildah are installed on the system, all others are unpacked in $TANDEM_KUBE_HOME.

set -euo pipefail
# shellcheck source=tools/kube/common.sh
. "$(dirname "$(realpath "$0")")/common.sh"

case ${1:-} in '') ;; -h | --help) usage && exit 0 ;; *) die "takes no arguments: see --help" ;; esac
export PATH=$PATH:/usr/sbin:/sbin

missing=()
command -v ip >/dev/null || missing+=(iproute2)
for package in iptables debootstrap buildah; do
    command -v "$package" >/dev/null || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    [ "$(id -u)" = 0 ] || die "missing ${missing[*]}: run 'sudo apt-get install ${missing[*]}' and try again"
    command -v apt-get >/dev/null || die "missing ${missing[*]} and no apt-get: install them and try again"
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
fi

"$TOOLS/build_control_plane.sh" kubelet kube-proxy pause

if [ ! -x "$BIN/runc" ] || [ ! -d "$BIN/cni" ]; then
    timed 'containerd, runc and CNI plugins of bookworm' unpack_debs bookworm containerd runc containernetworking-plugins
    cp "$TANDEM_KUBE_HOME"/sysroot/usr/bin/{containerd,containerd-shim-runc-v2,ctr} "$BIN/"
    rm -rf "$BIN/cni"
    cp -r "$TANDEM_KUBE_HOME/sysroot/usr/lib/cni" "$BIN/cni"
    cp "$TANDEM_KUBE_HOME/sysroot/usr/sbin/runc" "$BIN/"
fi
