"""`python -m tandem_engine.model.fallback_check FOLDER`: whether transformers can compute the model of a config.json.

Status 0 if it can; 1 with a sentence on standard output if not. No weights are read.
"""

import sys
from pathlib import Path

from tandem_engine.base.errors import CheckpointError
from tandem_engine.model.checkpoint_folder import open_directory
from tandem_engine.model.config_fields import read_fields
from tandem_engine.model.fallback_config import read_fallback_config


def main(folder: str) -> int:
    """Returns the exit status."""
    directory = open_directory(Path(folder))
    try:
        read_fallback_config(directory, read_fields(directory))
    except CheckpointError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
