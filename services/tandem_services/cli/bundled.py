"""Where the model that ships with Tandem is."""

from pathlib import Path

from tandem_engine.errors import ConfigError

NAME = "tandem-mini"


def bundled_model() -> Path:
    """Its folder, in an installed package or in a checkout. Raises `ConfigError` when neither has it."""
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "models" / NAME, package.parents[1] / "models" / NAME)
    for folder in candidates:
        if (folder / "config.json").is_file():
            return folder
    raise ConfigError(
        f"the bundled model is not installed here: name a checkpoint folder with --model (looked in {candidates})"
    )


def model_folder(path: str | None) -> Path:
    """The checkpoint that `--model` names, or the bundled one. Raises `ConfigError` when it is no checkpoint."""
    if path is None:
        return bundled_model()
    folder = Path(path).expanduser()
    if not folder.exists():
        raise ConfigError(f"--model {path}: no such folder")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model {path}: no config.json in it; name the folder of a Hugging Face checkpoint")
    return folder.resolve()
