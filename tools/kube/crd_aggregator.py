#!/usr/bin/env python3
"""Routes custom resources from an API server to the CRD engine; `control_plane.py` starts it.

    CRD established ─▶ APIService for each served version ─▶ … ─▶ CRD deleted ─▶ APIService deleted

A kube-apiserver passes a group and version on to another server where an APIService says so. They are not registered in
advance: an APIService without its CRD answers 503 and holds up the deletion of every namespace.
"""

from __future__ import annotations

import argparse
import base64
import time
from pathlib import Path

from kube_api import ApiError, Json, KubeApi

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
API_SERVICES = "/apis/apiregistration.k8s.io/v1/apiservices"
SERVICE = "/api/v1/namespaces/kube-system/services/crd-engine"
OWNER = "tandem-kube/crd-engine"
OURS = ("apiextensions.k8s.io", "v1")


class Aggregator:
    """Keeps the routes equal to the CRDs there are."""

    def __init__(self, api: KubeApi, port: int, authority: bytes) -> None:
        self.api, self.port = api, port
        self.authority = base64.b64encode(authority).decode()

    def create_service(self) -> None:
        """An ExternalName Service is how an APIService can point outside the cluster."""
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "crd-engine", "namespace": "kube-system"},
            "spec": {
                "type": "ExternalName",
                "externalName": "localhost",
                # The protocol is part of a port's key: 1.20 wants it written out for server-side apply.
                "ports": [{"port": self.port, "protocol": "TCP"}],
            },
        }
        for _ in range(100):
            try:
                self.api.apply(SERVICE, service, manager="crd-aggregator")
                return
            except ApiError as error:
                if error.status != 404:
                    raise
                time.sleep(0.1)  # the kube-system namespace is about to be made
        raise SystemExit("no kube-system namespace")

    def follow(self) -> None:
        """Reconcile now and at every change of a CRD, until the watch ends."""
        self.reconcile()
        for event in self.api.watch(CRDS):
            print(event["type"], event["object"]["metadata"]["name"], flush=True)
            self.reconcile()

    def reconcile(self) -> None:
        """Add and take away routes."""
        wanted = {key for crd in self.api.get(CRDS)["items"] for key in served_versions(crd)} | {OURS}
        listed = self.api.get(API_SERVICES, labelSelector=f"{OWNER}=true")["items"]
        present = {(one["spec"]["group"], one["spec"]["version"]) for one in listed}
        for group, version in sorted(wanted - present):
            self._route(group, version)
        for group, version in sorted(present - wanted):
            self.api.delete(f"{API_SERVICES}/{version}.{group}")
            print("unrouted", f"{version}.{group}", flush=True)

    def route_crds(self) -> None:
        """CRDs themselves: from then on the engine answers for them."""
        self._route(*OURS)

    def _route(self, group: str, version: str) -> None:
        name = f"{version}.{group}"
        service = {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": name, "labels": {OWNER: "true"}},
            "spec": {
                "group": group,
                "version": version,
                "groupPriorityMinimum": 16700,
                "versionPriority": 15,
                "caBundle": self.authority,
                "service": {"namespace": "kube-system", "name": "crd-engine", "port": self.port},
            },
        }
        try:  # 1.20 has no server-side apply for APIServices
            self.api.create(API_SERVICES, service)
        except ApiError as error:
            if error.status != 409:
                raise
            self.api.merge(f"{API_SERVICES}/{name}", service)
        print("routed", name, flush=True)


def served_versions(crd: Json) -> list[tuple[str, str]]:
    """Group and version of what an established CRD serves."""
    conditions = crd.get("status", {}).get("conditions") or []
    if not any(one["type"] == "Established" and one["status"] == "True" for one in conditions):
        return []
    return [(crd["spec"]["group"], version["name"]) for version in crd["spec"]["versions"] if version["served"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True, help="port of the CRD engine on this machine")
    parser.add_argument("--ca-file", type=Path, required=True, help="CA of the CRD engine's certificate")
    options = parser.parse_args()
    aggregator = Aggregator(KubeApi(options.kubeconfig), options.port, options.ca_file.read_bytes())
    aggregator.create_service()
    aggregator.route_crds()
    while True:
        try:
            aggregator.follow()
        except (ApiError, OSError) as error:
            print(error, flush=True)
            time.sleep(0.2)


if __name__ == "__main__":
    main()
