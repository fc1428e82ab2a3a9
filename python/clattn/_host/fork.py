"""What a forked child does before anything else."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def call_in_children(renew: Callable[[], object]) -> None:
    """Call a function in each forked child, to make locks anew.

    A lock that another thread holds during the fork stays locked in the child for ever, since the
    child has no such thread.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)
