"""How workers get LoRA adapters: read-only volumes below one folder, and an init container for each of the hub.

    /adapters/claims/CLAIM/…         a claim, once, however many adapters are on it
    /adapters/images/HASH/…          an image
    /adapters/hub/HASH/ID/REVISION   downloads: of one adapter, or of a claim that keeps them

Pods depend on the volumes and on nothing else of an adapter. Which adapters there are is a matter of commands to a
gateway (`planning.adapters`), so a further adapter on a mounted volume replaces no pod.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import replace

from tandem_operator.api.adapters import AdapterSource
from tandem_operator.api.sources import HuggingFaceSource
from tandem_operator.builders.containers import Manifest, scratch
from tandem_operator.builders.model_mount import HUB_CACHE_LIMIT, ModelMount, claim_volume, hub_download, image_volume
from tandem_operator.builders.served import Served

FOLDER = "/adapters"
ADAPTER_LIMIT = "64Gi"
HUB_HOME = "adapter-hf-home"

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What a worker reads of a repository."""


def folder_of(source: AdapterSource) -> str:
    """Below `FOLDER`: what commands name."""
    if source.claim is not None:
        return f"claims/{source.claim.claim_name}/{source.claim.path}".rstrip("/")
    if source.image is not None:
        return f"{_image_folder(source.image.reference)}/{source.image.path}".rstrip("/")
    hub = source.hugging_face
    assert hub is not None, "the source of an adapter has exactly one field"
    return f"{_hub_folder(hub)}/{hub.id}/{hub.revision}"


def claims_of(service: Served) -> list[str]:
    """Claims with adapters that workers mount, sorted."""
    of_adapters = (one.source.claim for one in service.spec.adapters)
    return sorted({*service.spec.adapter_claims, *(claim.claim_name for claim in of_adapters if claim is not None)})


def has_adapters(service: Served) -> bool:
    """Whether workers take adapters while they run."""
    return bool(service.spec.adapters or service.spec.adapter_claims)


def lora_words(service: Served) -> list[str]:
    """Flags of a worker that takes adapters while it runs."""
    return ["--lora-dir", FOLDER, "--allow-runtime-lora-updating"] if has_adapters(service) else []


def with_adapters(mount: ModelMount, service: Served, *, image: str) -> ModelMount:
    """`mount` with the volumes of adapters. `image` is the one that has the `hf` command."""
    volumes, mounts, downloads = list(mount.volumes), list(mount.mounts), list(mount.init_containers)
    for volume, folder in _volumes(service):
        volumes.append(volume)
        mounts.append({"name": volume["name"], "mountPath": f"{FOLDER}/{folder}", "readOnly": True})
    repositories = _repositories(service)
    if repositories:
        home, home_mount = scratch(HUB_HOME, "/hf", limit=HUB_CACHE_LIMIT)
        volumes.append(home)
        downloads += [_download(one, image, home_mount) for one in repositories]
    return replace(mount, volumes=tuple(volumes), mounts=tuple(mounts), init_containers=tuple(downloads))


def _volumes(service: Served) -> Iterator[tuple[Manifest, str]]:
    """Each volume once, with its folder."""
    for claim in claims_of(service):
        yield claim_volume(_volume_name("claim", claim), claim, read_only=True), f"claims/{claim}"
    images = {one.source.image.reference: one.source.image for one in service.spec.adapters if one.source.image}
    for reference, image in sorted(images.items()):
        yield image_volume(_volume_name("image", reference), image), _image_folder(reference)
    for folder, hub in sorted({_hub_folder(one): one for one in _repositories(service)}.items()):
        name = _volume_name("hub", _store_of(hub))
        if hub.cache_claim is not None:
            yield claim_volume(name, hub.cache_claim, read_only=False), folder
        else:
            yield scratch(name, "", limit=str(hub.size_limit or ADAPTER_LIMIT))[0], folder


def _repositories(service: Served) -> list[HuggingFaceSource]:
    """Each repository and revision once."""
    found = {folder_of(one.source): one.source.hugging_face for one in service.spec.adapters if one.source.hugging_face}
    return [source for _, source in sorted(found.items())]


def _download(source: HuggingFaceSource, image: str, home_mount: Manifest) -> Manifest:
    store: Manifest = {"name": _volume_name("hub", _store_of(source)), "mountPath": f"{FOLDER}/{_hub_folder(source)}"}
    folder = folder_of(AdapterSource(hugging_face=source))
    return hub_download(
        f"download-adapter-{_short(folder)}",
        source,
        folder=f"{FOLDER}/{folder}",
        include=ADAPTER_FILES,
        image=image,
        mounts=[store, home_mount],
    )


def _image_folder(reference: str) -> str:
    return f"images/{_short(reference)}"


def _hub_folder(source: HuggingFaceSource) -> str:
    return f"hub/{_short(_store_of(source))}"


def _store_of(source: HuggingFaceSource) -> str:
    """What the volume of its download is named after."""
    return f"claim {source.cache_claim}" if source.cache_claim is not None else f"{source.id}@{source.revision}"


def _volume_name(kind: str, what: str) -> str:
    return f"adapter-{kind}-{_short(what)}"


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
