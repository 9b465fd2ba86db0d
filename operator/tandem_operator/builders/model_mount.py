"""How a pod gets the checkpoint: volumes, mounts, an init container for downloads, and the directory to load."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem_operator.api.pods import SecretKey
from tandem_operator.api.sources import ClaimSource, HuggingFaceSource, ImageSource, ModelSource
from tandem_operator.builders.containers import TMP, Manifest, container_security, resources_of, scratch, value

MOUNT = "/models"
MODEL_VOLUME = "model"
DOWNLOADED = f"{MOUNT}/model"
MODEL_LIMIT = "1Ti"

HUB_CACHE_LIMIT = "16Gi"
"""Of the hub client's own files in addition to the model: chunks under way."""

TOKENIZER_FILES = ("*.json", "*.jinja", "tokenizer*", "*.txt")
"""What a gateway needs of a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelMount:
    """Parts of a pod."""

    folder: str
    """`--model` of the main container."""
    volumes: tuple[Manifest, ...] = ()
    mounts: tuple[Manifest, ...] = ()
    init_containers: tuple[Manifest, ...] = ()


FROM_WORKERS = "fleet"
"""`--model` of a gateway whose workers send the tokenizer, and `model` in a models file."""


def gateway_mount(source: ModelSource, tokenizer: str | None, *, image: str, cached: bool) -> ModelMount:
    """Of a gateway. `tokenizer`: where it comes from (`spec.gateway.tokenizer`); the others as of `model_mount`."""
    if tokenizer == "workers" or (tokenizer is None and source.path is None):
        return ModelMount(folder=FROM_WORKERS)
    return model_mount(source, image=image, weights=False, cached=cached)


def model_mount(source: ModelSource, *, image: str, weights: bool, cached: bool = False) -> ModelMount:
    """Of a worker, or of a gateway (not `weights`), which downloads no more than tokenizer and configuration.

    `image` is the one that has the `hf` command. `cached`: the claim is that of a ModelCache, of which the pod gets the
    directory of one commit.
    """
    if source.claim is not None:
        return _commit(source.claim) if cached else _claim(source.claim)
    if source.image is not None:
        return _image(source.image)
    if source.hugging_face is not None:
        return _hugging_face(source.hugging_face, image, weights=weights)
    assert source.path is not None, "a model source has exactly one field, and a ModelCache was replaced by its claim"
    return ModelMount(folder=source.path)


def _claim(source: ClaimSource) -> ModelMount:
    return ModelMount(
        folder=f"{MOUNT}/{source.path}".rstrip("/"),
        volumes=(claim_volume(MODEL_VOLUME, source.claim_name, read_only=True),),
        mounts=({"name": MODEL_VOLUME, "mountPath": MOUNT, "readOnly": True},),
    )


def _commit(source: ClaimSource) -> ModelMount:
    return ModelMount(
        folder=MOUNT,
        volumes=(claim_volume(MODEL_VOLUME, source.claim_name, read_only=True),),
        mounts=({"name": MODEL_VOLUME, "mountPath": MOUNT, "subPath": source.path, "readOnly": True},),
    )


def claim_volume(name: str, claim: str, *, read_only: bool) -> Manifest:
    """A volume of a pod that is a PersistentVolumeClaim."""
    return {"name": name, "persistentVolumeClaim": {"claimName": claim, **({"readOnly": True} if read_only else {})}}


def _image(source: ImageSource) -> ModelMount:
    return ModelMount(
        folder=f"{MOUNT}/{source.path}".rstrip("/"),
        volumes=(image_volume(MODEL_VOLUME, source),),
        mounts=({"name": MODEL_VOLUME, "mountPath": MOUNT, "readOnly": True},),
    )


def image_volume(name: str, source: ImageSource) -> Manifest:
    """A volume of a pod that is an OCI image."""
    volume: Manifest = {"reference": source.reference}
    if source.pull_policy is not None:
        volume["pullPolicy"] = source.pull_policy
    return {"name": name, "image": volume}


def _hugging_face(source: HuggingFaceSource, image: str, *, weights: bool) -> ModelMount:
    store, mount = scratch(MODEL_VOLUME, MOUNT, limit=str(source.size_limit or MODEL_LIMIT))
    if source.cache_claim is not None:
        store = claim_volume(MODEL_VOLUME, source.cache_claim, read_only=False)
    # Several pods may share a claim: one folder per revision, and the hub's client locks each file.
    folder = DOWNLOADED if source.cache_claim is None else f"{MOUNT}/{source.id}/{source.revision}"
    home, home_mount = scratch("hf-home", "/hf", limit=HUB_CACHE_LIMIT)
    include = () if weights else TOKENIZER_FILES
    download = hub_download("download", source, folder=folder, include=include, image=image, mounts=[mount, home_mount])
    return ModelMount(
        folder=folder,
        volumes=(store, home),
        mounts=({**mount, "readOnly": True},),
        init_containers=(download,),
    )


def hub_download(
    name: str, source: HuggingFaceSource, *, folder: str, include: Sequence[str], image: str, mounts: list[Manifest]
) -> Manifest:
    """An init container that downloads a repository to `folder`; `include`: patterns of its files, none for all.

    One of `mounts` is `/hf`, for the hub client's own files.
    """
    command = ["hf", "download", source.id, "--revision", source.revision, "--local-dir", folder]
    command += [word for pattern in include for word in ("--include", pattern)]
    return {
        "name": name,
        "image": image,
        "command": command,
        "env": [value("HF_HOME", "/hf"), *_token(source.token_secret)],
        "resources": resources_of(source.resources),
        # Every pod has this volume; without it Python finds no folder for temporary files.
        "volumeMounts": [*mounts, {"name": "tmp", "mountPath": TMP}],
        "securityContext": container_security(),
    }


def _token(secret: SecretKey | None) -> list[Manifest]:
    if secret is None:
        return []
    return [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}}]
