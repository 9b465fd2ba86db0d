"""Custom resources as the API server hands them out, decoded."""

import logging

import msgspec

from tandem_operator.api.model_service import ModelServiceSpec, ModelServiceStatus
from tandem_operator.api.worker_pool import WorkerPoolStatus
from tandem_operator.controller.objects import Seen

logger = logging.getLogger(__name__)


def spec_of(service: Seen) -> ModelServiceSpec:
    """Raises `ValueError` with one sentence when it is not what this operator's schema says: an older CRD let it
    pass, or a newer one [definitions-skew]."""
    try:
        return msgspec.convert(service.body.get("spec"), ModelServiceSpec)
    except msgspec.ValidationError as error:
        raise ValueError(f"{_path(str(error))}; apply the CRDs of this operator's version and correct it") from None


def status_of(service: Seen) -> ModelServiceStatus:
    """As last written; an empty one when it cannot be read, for it is written anew anyway."""
    try:
        return msgspec.convert(service.body.get("status", {}), ModelServiceStatus)
    except msgspec.ValidationError as error:
        logger.warning("resetting the invalid status of %s: %s", service.key, error)
        return ModelServiceStatus()


def pool_status_of(pool: Seen) -> WorkerPoolStatus:
    """As `status_of`."""
    try:
        return msgspec.convert(pool.body.get("status", {}), WorkerPoolStatus)
    except msgspec.ValidationError as error:
        logger.warning("resetting the invalid status of pool %s: %s", pool.ref.name, error)
        return WorkerPoolStatus()


def generation_of(seen: Seen) -> int:
    """Of its spec."""
    return int(seen.body["metadata"].get("generation", 0))


def _path(error: str) -> str:
    """msgspec names places as `$.prefill`; people know them as spec.prefill."""
    text, found, place = error.partition(" - at `$")
    return f"spec{place.rstrip('`')}: {text}" if found else f"spec: {text}"
