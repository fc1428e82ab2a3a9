# SPDX-License-Identifier: MIT
"""The tuner's numbers of a device, in this process."""

from clattn import _core

CLASSES, KNOBS = _core.tunables()

# Of attention_mma: warps that multiply alone, as on most devices, and groups of four.
WARPS = {"alone": {}, "together": {"TOGETHER": 4, "WARPS": 4, "BN": 64, "STAGES": 2}}


def clear(device):
    """All classes follow the plans' rules."""
    for one in CLASSES:
        for variant in KNOBS:
            _core.tune(device, one, variant, {})


def tune_all(device, dtype, variant, knobs):
    """The same numbers for all classes of a dtype."""
    for one in CLASSES:
        if one.startswith(f"{dtype}-"):
            _core.tune(device, one, variant, knobs)
