#!/usr/bin/env bash
# Compiles the CPU kernels of the bundled model for wheels, so that a first start compiles nothing (ADR 97).
#
# usage: kernel_packs.sh [--target NAME]… [--python COMMAND]… [--clear]
#
#   --target NAME     a kind of CPU that this machine has; default: x86-64-v3, x86-64-v4 and x86-64-v4-bf16. One that it
#                     does not have is an error
#   --python COMMAND  with the dependencies of [engine] installed; default: the one of .venv (TANDEM_VENV)
#   --clear           only delete what an earlier run made
#
# Files go to engine/tandem_engine/kernels/store/packs, which git ignores and wheels include: 0.5 MB for each target and
# Python. They fit the sources, and the versions of Python, numba and llvmlite, that they were made with; with any other
# an engine compiles its own. About 35 CPU seconds for each target and Python.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/.."

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' tools/kernel_packs.sh; }
die() { printf 'kernel_packs: %s\n' "$1" >&2; exit 1; }

packs=engine/tandem_engine/kernels/store/packs
targets=()
pythons=()
clear=
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help) usage; exit 0 ;;
    --target) targets+=("${2:?--target needs a name}") && shift ;;
    --python) pythons+=("${2:?--python needs a command}") && shift ;;
    --clear) clear=1 ;;
    *) die "unknown argument '$1': see --help" ;;
    esac
    shift
done
[ "${#pythons[@]}" -gt 0 ] || pythons=("${TANDEM_VENV:-.venv}/bin/python")
[ "${#targets[@]}" -gt 0 ] || targets=(x86-64-v3 x86-64-v4 x86-64-v4-bf16)

# Old ones would still be read where their key fits, and be in the wheel where it does not.
rm -rf "$packs"
[ -z "$clear" ] || exit 0
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT

export PYTHONPATH=engine TANDEM_CACHE_DIR=$cache
unset TANDEM_KERNELS_PATH NUMBA_CPU_NAME NUMBA_CPU_FEATURES ATEN_CPU_CAPABILITY
for python in "${pythons[@]}"; do
    for target in "${targets[@]}"; do
        TANDEM_KERNEL_TARGET=$target "$python" -m tandem_engine.cli kernels build \
            --model models/tandem-mini --dtype float32 ||
            die "$python cannot compile kernels for $target"
    done
done
mkdir -p "$packs"
install -m 644 "$cache"/kernels/*.kernel "$packs/"
printf '%s: %d kernels, %d KiB\n' "$packs" "$(find "$packs" -name '*.kernel' | wc -l)" "$(du -sk "$packs" | cut -f1)"
