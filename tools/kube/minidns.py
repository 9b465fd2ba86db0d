#!/usr/bin/env python3
"""Cluster DNS for the single node: A records over UDP, answered from the API server.

  SERVICE.NAMESPACE.svc.cluster.local          the ClusterIP, or the pod addresses of a headless Service
  POD.SERVICE.NAMESPACE.svc.cluster.local      the address of a pod with a hostname (StatefulSets)

Every other name does not exist; a known name asked for another type (AAAA, SRV) has no records.
"""

from __future__ import annotations

import argparse
import socket
import struct
import time
from pathlib import Path

from kube_api import ApiError, KubeApi

SUFFIX = ["svc", "cluster", "local"]
TYPE_A, CLASS_IN = 1, 1
NXDOMAIN = 3
CACHE_SECONDS = 1.0


class Resolver:
    def __init__(self, api: KubeApi) -> None:
        self.api = api
        self.cache: dict[str, tuple[float, list[str] | None]] = {}

    def addresses(self, name: str) -> list[str] | None:
        """The IPv4 addresses of a name; None when the name does not exist."""
        kept_until, found = self.cache.get(name, (0.0, None))
        if time.monotonic() > kept_until:
            found = self._look_up(name.lower().rstrip(".").split("."))
            self.cache[name] = (time.monotonic() + CACHE_SECONDS, found)
        return found

    def _look_up(self, labels: list[str]) -> list[str] | None:
        if labels[-3:] != SUFFIX or len(labels) not in (5, 6):
            return None
        *pod, service, namespace = labels[:-3]
        root = f"/api/v1/namespaces/{namespace}"
        try:
            spec = self.api.get(f"{root}/services/{service}")["spec"]
            if not pod and spec.get("clusterIP") not in (None, "", "None"):
                return [spec["clusterIP"]]
            subsets = self.api.get(f"{root}/endpoints/{service}").get("subsets", [])
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        fields = ["addresses"] + ["notReadyAddresses"] * bool(spec.get("publishNotReadyAddresses"))
        found = [a for subset in subsets for field in fields for a in subset.get(field, [])]
        if pod:
            return [a["ip"] for a in found if a.get("hostname") == pod[0]] or None
        return [a["ip"] for a in found]


def answer(query: bytes, resolver: Resolver) -> bytes:
    """The reply to one DNS message with one question."""
    position, labels = 12, []
    while length := query[position]:
        labels.append(query[position + 1 : position + 1 + length].decode("ascii"))
        position += 1 + length
    question = query[12 : position + 5]
    (kind,) = struct.unpack(">H", question[-4:-2])
    found = resolver.addresses(".".join(labels))
    records = (found or []) if kind == TYPE_A else []
    flags = 0x8580 | (NXDOMAIN if found is None else 0)  # authoritative answer, recursion "available"
    header = query[:2] + struct.pack(">HHHHH", flags, 1, len(records), 0, 0)
    pointer_to_name, ttl = 0xC00C, 1
    return (
        header
        + question
        + b"".join(
            struct.pack(">HHHIH", pointer_to_name, TYPE_A, CLASS_IN, ttl, 4) + socket.inet_aton(address)
            for address in records
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--listen", default="127.0.0.1", help="address to answer on")
    parser.add_argument("--port", type=int, default=53)
    options = parser.parse_args()
    resolver = Resolver(KubeApi(options.kubeconfig))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((options.listen, options.port))
        while True:
            query, client = server.recvfrom(2048)
            try:
                server.sendto(answer(query, resolver), client)
            except (ApiError, OSError, IndexError, UnicodeDecodeError, struct.error) as error:
                print(f"query from {client}: {error!r}", flush=True)  # no reply: the client asks again


if __name__ == "__main__":
    main()
