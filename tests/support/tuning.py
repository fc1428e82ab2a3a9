# SPDX-License-Identifier: MIT
"""The tuner's numbers of a device, in this process."""

from clattn import _core

DTYPES, HEAD_SIZES, ROWS, KNOBS = _core.tunables()


def clear(device):
    """All classes follow the plans' rules."""
    for dtype in DTYPES:
        for size in HEAD_SIZES:
            for rows in ROWS:
                for variant in KNOBS:
                    _core.tune(device, dtype, size, rows, variant, {})


def tune_all(device, dtype, variant, knobs):
    """The same numbers for all classes of a dtype."""
    for size in HEAD_SIZES:
        for rows in ROWS:
            _core.tune(device, dtype, size, rows, variant, knobs)
