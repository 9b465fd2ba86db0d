"""The folder in which the ranks of one engine meet: of this user alone, and gone when they are.

Rank 0 makes it, and removes it when its engine closes. Where rank 0 was killed the others remove it when they notice.
"""

from contextlib import AbstractContextManager
from pathlib import Path

from tandem_engine.ipc.own_folder import own_folder

PREFIX = "tandem-ranks-"


def meeting_place() -> AbstractContextManager[Path]:
    """See `own_folder`."""
    return own_folder(PREFIX)
