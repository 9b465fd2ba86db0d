#!/bin/sh
# Installs what requirements.txt lists into /opt/tandem/venv, in the versions of constraints.txt.
#
# usage: install-dependencies.sh none|cpu|cuda      the build of torch
set -eu
cd "$(dirname "$0")/.."
torch=$1
cpu_index=https://download.pytorch.org/whl/cpu

pip() { /opt/pip/bin/pip --python /opt/tandem/venv/bin/python "$@"; }
torch_version() { sed -n 's/^torch==//p' docker/constraints.txt; }

case $torch in
none) ;;
cpu)
    # A configured index may carry the CPU build itself; otherwise it is torch's own index that has it.
    pip install "torch==$(torch_version)+cpu" ||
        pip install "torch==$(torch_version)+cpu" --extra-index-url "$cpu_index"
    ;;
cuda)
    PIP_CONSTRAINT="$PIP_CONSTRAINT $PWD/docker/constraints-cuda.txt"
    export PIP_CONSTRAINT
    # "===": "==" takes 2.13.0+cpu for newer than 2.13.0, which is the CUDA build, where an index or a mirror has both.
    pip install "torch===$(torch_version)"
    ;;
*) echo "install-dependencies.sh: torch is none, cpu or cuda, not '$torch'" >&2 && exit 2 ;;
esac

pip install --requirement requirements.txt

site=$(echo /opt/tandem/venv/lib/python3*/site-packages)
if [ -d "$site/envoy" ] && [ -d "$site/opentelemetry" ]; then
    # xds-protos up to 1.85 has an old copy of this package's files; who is installed last wins (grpc/grpc#42926).
    pip install --force-reinstall --no-deps opentelemetry-proto
fi
if [ -d "$site/nixl" ]; then
    # NIXL comes twice, for CUDA 12 and 13, and torch is built with 13; its expert-parallel kernels are not used.
    pip uninstall --yes nixl-cu12
    rm -rf "$site"/nixl_ep_cu12 "$site"/nixl_ep_cu13
fi
# Headers and tests of packages: a tenth of torch.
rm -rf "$site"/torch/include "$site"/torch/share "$site"/torch/test "$site"/numpy/*/tests "$site"/numba/tests

# Our own code lies beside the environment, so that it is a layer of its own.
echo /opt/tandem/app >"$site/tandem.pth"
