"""Custom resources as people write them, for tests against a real API server."""

from typing import Any

Manifest = dict[str, Any]


def model_service(namespace: str, name: str = "chat", **spec: Any) -> Manifest:
    """The smallest one that is valid, with `spec` over it."""
    return {
        "apiVersion": "tandem.dev/v1beta1",
        "kind": "ModelService",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"path": "/models/mini"}, **spec},
    }


def worker_pool(namespace: str, name: str = "chat-decode", **spec: Any) -> Manifest:
    """One of the service `chat`."""
    return {
        "apiVersion": "tandem.dev/v1beta1",
        "kind": "WorkerPool",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"serviceName": "chat", "role": "decode", **spec},
    }


def model_adapter(namespace: str, of: str = "sql", **spec: Any) -> Manifest:
    """One of the service `chat`, on its claim `adapters`; `of` is the name of the object."""
    return {
        "apiVersion": "tandem.dev/v1beta1",
        "kind": "ModelAdapter",
        "metadata": {"name": of, "namespace": namespace},
        "spec": {"serviceName": "chat", "source": {"claim": {"claimName": "adapters", "path": of}}, **spec},
    }


def model_cache(namespace: str, name: str = "qwen", **spec: Any) -> Manifest:
    """One with a claim of its own, with `spec` over it."""
    source = {"huggingFace": {"id": "org/mini"}}
    return {
        "apiVersion": "tandem.dev/v1beta1",
        "kind": "ModelCache",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"source": source, "storage": {"newClaim": {"size": "10Gi"}}, **spec},
    }


def model_gateway(namespace: str, name: str = "front", **spec: Any) -> Manifest:
    """One with `spec`, of which nothing is required."""
    return {
        "apiVersion": "tandem.dev/v1beta1",
        "kind": "ModelGateway",
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }
