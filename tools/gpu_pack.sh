#!/usr/bin/env bash
# A kit for a GPU machine without a package registry: tools/gpu_pack.sh [FOLDER] [--find-links WHEELS] [--kernels-by PYTHON] (docs/gpu.md).
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
python=${TANDEM_VENV:-$here/.venv}/bin/python
PYTHONPATH="$here/benchmarks" exec "$python" -m gpu.kit.pack "$@"
