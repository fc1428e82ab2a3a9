"""Attention over a sequence that the processes of an MPI program hold together.

Each rank has a part of the queries and a part of the keys and values. ``ring_attention`` gives each
rank the result of its rows over all keys, and ``ring_attention_backward`` the gradients of what it
has; ``split`` and ``join`` take a sequence apart and put it together. MPI moves the keys, values
and gradients, through mpi4py, which the extra ``mpi`` installs.
"""

from __future__ import annotations

from clattn._host.extras import how_to_install

try:
    from mpi4py import MPI as _MPI  # noqa: F401
except (ImportError, RuntimeError) as error:
    raise ImportError(
        f"clattn.mpi needs mpi4py ({how_to_install('mpi')}) and an MPI library, such as that of "
        f"apt-get install openmpi-bin; {error}"
    ) from error

from clattn.mpi.backward import ring_attention_backward
from clattn.mpi.forward import ring_attention
from clattn.mpi.sequences import join, split

__all__ = ["join", "ring_attention", "ring_attention_backward", "split"]
