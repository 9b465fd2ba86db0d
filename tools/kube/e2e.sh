#!/usr/bin/env bash
# End to end: builds what is missing, brings up a real cluster of one node with our images, runs tests/e2e on it and takes
# it down again.
#
# usage: e2e.sh [--keep] [pytest arguments]        as root, after tools/setup.sh
#
#   --keep    leave the cluster up afterwards (tools/kube/node.py down takes it down)
#
# About half an hour the first time on two cores, most of it for building Kubernetes and the images; minutes later on.

set -euo pipefail
# shellcheck source=tools/kube/common.sh
. "$(dirname "$(realpath "$0")")/common.sh"
cd "$TOOLS/../.."

case ${1:-} in -h | --help) usage && exit 0 ;; esac
keep=no
if [ "${1:-}" = --keep ]; then keep=yes && shift; fi
[ "$(id -u)" = 0 ] || die 'root is needed: pods are real containers'
venv=${TANDEM_VENV:-.venv}
export PYTHON=$PWD/$venv/bin/python
case $venv in /*) PYTHON=$venv/bin/python ;; esac

"$TOOLS/setup.sh"
"$TOOLS/setup_node.sh"
"$TOOLS/build_images.sh"

take_down() { [ "$keep" = yes ] || python3 "$TOOLS/node.py" down; }
trap take_down EXIT
python3 "$TOOLS/node.py" up
TANDEM_E2E_KUBECONFIG=$TANDEM_KUBE_HOME/run/node/kubeconfig "$PYTHON" -m pytest tests/e2e -p no:xdist -v "$@"
