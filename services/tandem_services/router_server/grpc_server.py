"""The gRPC port: the router's own service, external processing, health and reflection.

Health is told by service, as the endpoint-picker protocol asks: `liveness` as long as the process answers, everything
else as /ready.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as grpc_health
from grpc_reflection.v1alpha import reflection

from tandem_engine.addresses import EVERY_ADDRESS, Address
from tandem_engine.errors import ConfigError
from tandem_services.common.errors import StartupError
from tandem_services.common.health import Health
from tandem_services.common.tasks import for_ever
from tandem_services.gateway.limits import MAX_BODY_BYTES
from tandem_services.router_server import ext_proc, grpc_api
from tandem_services.router_server.ext_proc import ExternalProcessor
from tandem_services.router_server.grpc_api import RouterService

# Descriptors that reflection finds by name in the pool.
from tandem_services.router_server.protos import router_pb2  # noqa: F401

logger = logging.getLogger(__name__)

HEALTH_EVERY_S = 0.5
LIVENESS = "liveness"
READINESS = ("", "readiness", ext_proc.SERVICE, grpc_api.SERVICE)
MESSAGE_MARGIN = 64 << 10
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_BODY_BYTES + MESSAGE_MARGIN),
    # Two routers on one port would each get half of the requests, and a port that is taken would go unnoticed.
    ("grpc.so_reuseport", 0),
)


@dataclass(kw_only=True, slots=True)
class GrpcServer:
    """One per router. `start`, then `run` beside everything else, then `stop`."""

    api: RouterService
    processor: ExternalProcessor
    health: Health
    host: str
    port: int
    """0: any that is free; after `start` the one it is."""
    credentials: Any = None
    """None: no TLS."""
    _server: Any = field(default=None, init=False)
    _reporter: grpc_health.HealthServicer = field(default_factory=grpc_health.HealthServicer, init=False)

    async def start(self) -> None:
        """Raises `StartupError` when the port is taken."""
        server = grpc.aio.server(options=OPTIONS)
        server.add_generic_rpc_handlers((self.api.handler(), self.processor.handler()))
        health_pb2_grpc.add_HealthServicer_to_server(self._reporter, server)
        names = (ext_proc.SERVICE, grpc_api.SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
        # gRPC takes :: as `common.listening.listen` does.
        address = str(Address(self.host or EVERY_ADDRESS, self.port))
        try:
            if self.credentials is None:
                self.port = server.add_insecure_port(address)
            else:
                self.port = server.add_secure_port(address, self.credentials)
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {address}: choose another --host or --grpc-port") from error
        await self._reporter.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.report()
        await server.start()
        self._server = server

    async def run(self) -> None:
        """Tell health as it changes, for ever."""
        complaint = "cannot report the health of the gRPC services"
        await for_ever(self.report, every_s=HEALTH_EVERY_S, logger=logger, complaint=complaint)

    async def report(self) -> None:
        status = health_pb2.HealthCheckResponse
        now = status.SERVING if self.health.report().ok else status.NOT_SERVING
        for name in READINESS:
            await self._reporter.set(name, now)

    async def stop(self, grace_s: float) -> None:
        """Requests that run have `grace_s` to end."""
        if self._server is not None:
            await self._server.stop(grace_s)


def tls_credentials(cert: Path | None, key: Path | None) -> Any:
    """None without TLS. Raises `ConfigError`."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ConfigError("--tls-cert and --tls-key go together")
    try:
        return grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    except OSError as error:
        raise ConfigError(f"--tls-cert {cert}, --tls-key {key}: {error.strerror}") from error
