#!/usr/bin/env bash
# Unpack a kit on the GPU machine and print the PYTHONPATH to use: tools/gpu_unpack.sh [FOLDER] [SITE] (docs/gpu.md).
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
PYTHONPATH="$here/benchmarks" exec "${TANDEM_PYTHON:-python3}" -m gpu.kit.unpack "$@"
