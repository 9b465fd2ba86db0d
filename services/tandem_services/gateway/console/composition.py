"""Composes the console of a gateway."""

from collections.abc import Callable, Sequence

from tandem_services.gateway.composition import Gateway
from tandem_services.gateway.console.fleet_document import GatewayFigures, ViewedFleet, fleet_document
from tandem_services.gateway.console.routes import Console
from tandem_services.gateway.console.shared_document import SharedDocument
from tandem_services.gateway.console.traffic import latest_requests, traffic


def console_of(gateway: Gateway, fleets: Callable[[], Sequence[ViewedFleet]]) -> Console:
    """`fleets`: those of its models now, at least one."""
    journal = gateway.answering.journal
    figures = GatewayFigures(
        health=gateway.health,
        running=lambda: journal.running,
        waiting=lambda: sum(len(service.dispatcher.placing.admission.binding.queue) for service in gateway.models),
        traffic=lambda: traffic(journal),
    )
    return Console(
        fleet=SharedDocument(build=lambda: fleet_document(fleets(), figures), clock=gateway.clock),
        requests=SharedDocument(build=lambda: latest_requests(journal), clock=gateway.clock),
        journal=journal,
    )
