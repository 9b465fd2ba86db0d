"""LeaderWorkerSet of the workers of one role of one revision, where each has its ranks on several pods.

    LeaderWorkerSet          one per role and revision, as a Deployment is of workers of one pod
    group of `nodes` pods    one worker. The leader, index 0, is the worker to everybody else; the others follow it
    $(LWS_WORKER_INDEX)      which of them a container is in; $(LWS_LEADER_ADDRESS), where they meet

A container that ends takes its group with it: ranks are lost as a whole (ADR 43). Followers have a component label of
their own, so that nothing takes one for a worker.
"""

from tandem_operator.api.roles import RoleName
from tandem_operator.builders.containers import Manifest
from tandem_operator.builders.naming import deployment_name, labels_of
from tandem_operator.builders.served import Served
from tandem_operator.builders.worker import worker_deployment, worker_labels, worker_template

LEADER_WORKER_SETS = "leaderworkerset.x-k8s.io/v1"
FOLLOWER = "follower"
"""Component of the pods of a group that are not its leader."""


def workers(service: Served, role: RoleName, revision: str, replicas: int, *, standby: bool = False) -> Manifest:
    """A Deployment where a worker is one pod, else a LeaderWorkerSet. `standby`: they stand by until offered."""
    if service.nodes(role) == 1:
        return worker_deployment(service, role, revision, replicas, standby=standby)
    labels = worker_labels(service, role, revision)
    rollout = service.spec.rollout
    following = labels_of(service.name, FOLLOWER, role=role, revision=revision)
    return {
        "apiVersion": LEADER_WORKER_SETS,
        "kind": "LeaderWorkerSet",
        "metadata": {
            "name": deployment_name(service.name, role, revision),
            "namespace": service.namespace,
            "labels": labels,
        },
        "spec": {
            "replicas": replicas,
            # Leaders wait for their followers, so these cannot wait for leaders that are ready.
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {
                    "partition": 0,
                    "maxSurge": rollout.max_surge,
                    "maxUnavailable": rollout.max_unavailable,
                },
            },
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": {
                "size": service.nodes(role),
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": worker_template(service, role, labels, standby=standby),
                "workerTemplate": worker_template(service, role, following, standby=standby),
            },
        },
    }
