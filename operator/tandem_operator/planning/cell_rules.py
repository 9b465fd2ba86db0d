"""What is wrong with the cells of a spec beyond its schema; each error names the field and the fix."""

from collections import Counter
from collections.abc import Iterator

from tandem_operator.builders.served import Served, may_be_zero


def cell_problems(service: Served) -> Iterator[str]:
    """One sentence each; none without cells."""
    spec = service.spec
    if not spec.cells:
        return
    yield from _names(service)
    if spec.gateway_ref is not None:
        yield (
            f"spec.cells: gateways of ModelGateway {spec.gateway_ref.name!r} serve several models, each in one cell; "
            f"remove cells, or gatewayRef"
        )
    if spec.served_model_name is None:
        yield (
            "spec.cells: workers of all cells serve the model under one name; set spec.servedModelName in each of "
            "these services, to the same name"
        )
    if spec.security.curve_secret is None:
        yield (
            "spec.cells: gateways reach workers of all cells with one key file; create one (tandem keys deployment "
            "keys.json) and a Secret with it, and set spec.security.curveSecret in each of these services"
        )
    if may_be_zero(spec):
        yield (
            "spec.cells: a service that may scale to zero does not see requests of other cells; set minReplicas of a "
            "role to 1 or more, or remove cells"
        )


def _names(service: Served) -> Iterator[str]:
    counted = Counter(cell.service for cell in service.spec.cells)
    for name, count in counted.items():
        if name == service.name:
            yield f"spec.cells: {name!r} is this service itself; name the others alone"
        if count > 1:
            yield f"spec.cells: {name!r} is given {count} times; remove all but one"
