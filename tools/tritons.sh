#!/usr/bin/env bash
# Unpacks the Tritons that `make test-tritons` compiles kernels with: that of torch 2.11, and that of the CUDA image.
# Nothing is installed into the virtual environment; a second run ends at once.
#
#   TANDEM_TRITONS_HOME=DIR    where they go, a folder for each version (default ~/.cache/tandem-tritons)
#   PIP="python -m pip"        what downloads them
set -euo pipefail
cd "$(dirname "$0")/.."

home=${TANDEM_TRITONS_HOME:-$HOME/.cache/tandem-tritons}
image=$(sed -n 's/^triton==//p' docker/constraints-cuda.txt)
for version in 3.6.0 "$image"; do
    [ -e "$home/$version/triton/__init__.py" ] && continue
    rm -rf "$home/.new" "$home/$version"
    # shellcheck disable=SC2086 # a command with arguments
    ${PIP:-python3 -m pip} install --quiet --no-deps --target "$home/.new" "triton==$version"
    mv "$home/.new" "$home/$version"
    echo "tritons: $home/$version"
done
