"""A service with its pools, Deployments and pods, as a poll of its pods finds it."""

from collections.abc import Sequence

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.builders.served import Served
from tandem_operator.controller.observations import Parts, Subject
from tandem_operator.controller.store import WORKER_POOL
from tandem_operator.telemetry.pods import PodSeen
from tandem_testing.kube_cluster import service_of
from tandem_testing.kube_objects import a_deployment, a_pod, a_service, an_object
from tandem_testing.pod_builders import pod

OWNER = "uid-ModelService-chat"
GATEWAY, PREFILL, DECODE = pod("g", "gateway", revision=""), pod("p", "prefill"), pod("d")


def subject(wanted: Served | None = None, *, pods: Sequence[PodSeen] = (GATEWAY, PREFILL, DECODE)) -> Subject:
    """Pools of one worker each; Deployments of all revisions that `pods` have, and of r1."""
    wanted = wanted or service_of()
    pools = [
        an_object(
            WORKER_POOL,
            f"chat-{role}",
            owner=OWNER,
            metadata={"labels": {"tandem.dev/service": "chat"}},
            spec={"role": role, "replicas": 1, "serviceName": "chat"},
        )
        for role in ("prefill", "decode")
    ]
    revisions = {"r1", *(one.revision for one in pods if one.worker_role)}
    deployments = [
        a_deployment(f"chat-{role}-{revision}", owner=OWNER, role=role, revision=revision)
        for revision in sorted(revisions)
        for role in ("prefill", "decode")
    ]
    workers = [a_pod("p"), a_pod("d", role="decode")]
    return Subject(
        service=a_service(),
        wanted=wanted,
        status=ModelServiceStatus(revision="r1"),
        parts=Parts.of(OWNER, [*pools, *deployments, *workers]),
        pods=tuple(pods),
        now="2026-01-01T00:00:00Z",
    )
