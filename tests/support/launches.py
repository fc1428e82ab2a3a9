# SPDX-License-Identifier: MIT
"""Which kernels a call launches: their variants, macros and work-groups."""

from dataclasses import dataclass

import clattn
import pytest
from support.forced import force, variant_of


@dataclass(frozen=True)
class Launched:
    """One kernel of a call."""

    kernel: str  # "attention_cpu"
    macros: dict[str, int]
    groups: int  # work-groups

    @property
    def program(self):
        return self.kernel, tuple(self.macros.items())

    @property
    def variant(self):
        """The word of CLATTN_KERNEL."""
        return variant_of(self.kernel, self.macros)


def launched_once(call, *args, **options):
    """What a call launches, in order, and what it tries if it is the first of its kind."""
    clattn._core.launched()
    call(*args, **options)
    return [Launched(*entry) for entry in clattn._core.launched()]


def launched_by(call, *args, **options):
    """What a call launches, in order. It is called twice: the first call may try kernels too."""
    call(*args, **options)
    return launched_once(call, *args, **options)


def chosen(word, call, *args, **options):
    """The variant that computes a call of attention, with CLATTN_KERNEL set to a word or to None.

    Its kernel is the first one. Others merge splits, or compute rows again.
    """
    with pytest.MonkeyPatch.context() as patch:
        force(patch, word)
        return launched_by(call, *args, **options)[0].variant
