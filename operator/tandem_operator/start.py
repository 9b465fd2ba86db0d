"""Console script of `tandem-operator`. Without its extra, or interrupted while it loads, it prints no traceback."""

import sys


def main() -> None:
    """The command."""
    try:
        from tandem_operator.cli import main as run

        run()
    except ModuleNotFoundError as error:
        from tandem_engine.base.extras import missing_extra

        sentence = missing_extra(error)
        if sentence is None:
            raise
        sys.exit(f"tandem-operator: {sentence}")
    except KeyboardInterrupt:
        sys.exit(130)
