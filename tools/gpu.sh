#!/usr/bin/env bash
# Tests and benchmarks of the GPU path (docs/gpu.md). Without a GPU it says in one line what is left out, and succeeds.
#
#   TANDEM_PYTHON=python3   an interpreter that has torch and what docs/gpu.md lists (default that of TANDEM_VENV)
#   tools/gpu.sh ARGS…      for benchmarks/gpu (--only, --model, --json, --help)
#
# Nothing is installed, for a machine with a GPU may have no way to. Benchmarks run whatever the tests say; the exit
# status is 1 if either failed.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${TANDEM_PYTHON:-${TANDEM_VENV:-.venv}/bin/python}
"$python" -c 'import torch' 2>/dev/null || {
    echo "gpu: $python has no torch: run TANDEM_TORCH=cuda make setup, or set TANDEM_PYTHON" >&2
    exit 1
}
why=$("$python" -c 'import torch
if not torch.cuda.is_available():
    print("torch", torch.__version__, "sees no GPU" if torch.version.cuda else "is a build without CUDA")')
if [ -n "$why" ]; then
    echo "gpu: skipped tests/gpu and benchmarks/gpu: $why"
    exit 0
fi

export PYTHONPATH="engine:services:operator:tests/support${PYTHONPATH:+:$PYTHONPATH}"
failed=0
if "$python" -c 'import pytest' 2>/dev/null; then
    # A file each in a process of its own: after an illegal access a process can do nothing more with its GPU.
    for file in tests/gpu/test_*.py; do
        # Not the configuration of all tests: it wants plug-ins that these do not need.
        "$python" -m pytest -c /dev/null --rootdir . -p no:cacheprovider --import-mode=importlib --noconftest -ra \
            -o markers='gpu: needs a CUDA device' "$file" || failed=1
    done
else
    echo "gpu: skipped tests/gpu: $python has no pytest"
fi

# Whatever the tests say: figures tell where a GPU is slow, tests where it is wrong.
PYTHONPATH="benchmarks:$PYTHONPATH" "$python" -m gpu "$@" || failed=1
exit "$failed"
