"""Other cells of a ModelService, as its gateways see them: flags, and files with passwords and authorities.

Another cell may not be there yet, or be deleted. Its Secrets are therefore optional: a gateway starts without them, and
reaches the cell when kubelets have mounted them.
"""

from tandem_operator.api.model_service import Cell, Redis
from tandem_operator.api.pods import SecretKey
from tandem_operator.builders.containers import Manifest
from tandem_operator.builders.naming import cluster_name, redis_secret_name
from tandem_operator.builders.redis import PASSWORD_KEY, redis_url
from tandem_operator.builders.served import Served

FOLDER = "/etc/tandem/cells"
PASSWORD, SENTINEL, CA = "password", "sentinel-password", "ca.crt"


def cell_words(service: Served) -> list[str]:
    """Arguments of gateways; none without cells."""
    urls, passwords = [], []
    for cell in service.spec.cells:
        name, folder = cluster_name(service.namespace, cell.service), _folder(cell)
        urls.append(f"{name}={_url(cell)}")
        if PASSWORD in _secrets(cell):
            passwords.append(f"{name}={folder}/{PASSWORD}")
    words = ["--cells", *urls] if urls else []
    return [*words, "--cell-password-files", *passwords] if passwords else words


def cell_volumes(service: Served) -> list[tuple[Manifest, Manifest]]:
    """Volumes with their mounts, one for each cell that has secrets."""
    return [
        _volume(f"cell-{number}", _folder(cell), secrets)
        for number, cell in enumerate(service.spec.cells)
        if (secrets := _secrets(cell))
    ]


def _folder(cell: Cell) -> str:
    return f"{FOLDER}/{cell.service}"


def _url(cell: Cell) -> str:
    folder = _folder(cell)
    files = {"ca_file": f"{folder}/{CA}", "sentinel_password_file": f"{folder}/{SENTINEL}"}
    return redis_url(Redis(external=cell.redis), cell.service, **files)


def _secrets(cell: Cell) -> dict[str, SecretKey]:
    """By file name."""
    if cell.redis is None:
        return {PASSWORD: SecretKey(name=redis_secret_name(cell.service), key=PASSWORD_KEY)}
    given = {PASSWORD: cell.redis.password, SENTINEL: cell.redis.sentinel_password, CA: cell.redis.ca_secret}
    return {file: secret for file, secret in given.items() if secret is not None}


def _volume(name: str, folder: str, secrets: dict[str, SecretKey]) -> tuple[Manifest, Manifest]:
    sources = [
        {"secret": {"name": secret.name, "items": [{"key": secret.key, "path": file}], "optional": True}}
        for file, secret in secrets.items()
    ]
    volume: Manifest = {"name": name, "projected": {"sources": sources, "defaultMode": 0o440}}
    return volume, {"name": name, "mountPath": folder, "readOnly": True}
