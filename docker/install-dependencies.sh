#!/bin/sh
# Installs the files of one of docker/locks into /opt/tandem/venv: these, by their hashes, or none.
#
# usage: install-dependencies.sh services|operator|engine-cpu|engine-cuda
set -eu
cd "$(dirname "$0")/.."
lock=docker/locks/$1.txt
cpu_index=https://download.pytorch.org/whl/cpu

pip() { /opt/pip/bin/pip --python /opt/tandem/venv/bin/python "$@"; }
install() { pip install --require-hashes --no-deps --no-compile "$@"; }

case $1 in
services | operator | engine-cuda) install --requirement "$lock" ;;
engine-cpu)
    # A configured index may carry the CPU build of torch itself; otherwise it is torch's own index that has it.
    install --requirement "$lock" || install --requirement "$lock" --extra-index-url "$cpu_index"
    ;;
*) echo "install-dependencies.sh: there is no lock for '$1'" >&2 && exit 2 ;;
esac
# What a package requires with this Python alone is not in a lock that was written with another one.
pip check

site=$(echo /opt/tandem/venv/lib/python3*/site-packages)
if [ -d "$site/envoy" ] && [ -d "$site/opentelemetry" ]; then
    # xds-protos up to 1.85 has an old copy of this package's files; the package installed last wins (grpc/grpc#42926).
    grep '^opentelemetry-proto==' "$lock" >opentelemetry-proto.txt
    install --force-reinstall --requirement opentelemetry-proto.txt
fi
if [ -d "$site/nixl" ]; then
    # NIXL comes twice, for CUDA 12 and 13, and torch is built with 13; its expert-parallel kernels are not used.
    pip uninstall --yes nixl-cu12
    rm -rf "$site"/nixl_ep_cu12 "$site"/nixl_ep_cu13
fi
# Headers and tests of packages: a tenth of torch.
rm -rf "$site"/torch/include "$site"/torch/share "$site"/torch/test "$site"/numpy/*/tests "$site"/numba/tests

# Bytecode that is not compared with the dates of its sources: images give all files one. Some packages have templates
# that are no Python; pip ignores these, too.
find "$site" -name __pycache__ -prune -exec rm -rf {} +
# -f: this interpreter has compiled what `.pth` files import, with a date.
python3 -m compileall -q -f -j 1 --invalidation-mode unchecked-hash "$site" || true
# Our own code lies beside the environment, so that it is a layer of its own.
echo /opt/tandem/app >"$site/tandem.pth"
