#!/usr/bin/env bash
# Generates the messages of the router's gRPC service from services/tandem_services/router_server/protos/router.proto.
#
#   tools/router_protos.sh            needs grpcio-tools, which .[dev] installs
#
# tests/unit/services/router_server/test_router_protos.py says when this has been forgotten.
set -euo pipefail
cd "$(dirname "$0")/../services"
python=${TANDEM_VENV:-../.venv}/bin/python
"$python" -m grpc_tools.protoc -I. --python_out=. --pyi_out=. tandem_services/router_server/protos/router.proto
