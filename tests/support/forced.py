# SPDX-License-Identifier: MIT
"""How tests force a variant of attention, in this process and in children."""

import os

import clattn
from references.attention import bfloat16, float16

# The variants that round weights to a half type before values are summed, and to which.
ROUND_WEIGHTS = {
    "pairs": (bfloat16,),
    "amx": (bfloat16,),
    "mma": (float16, bfloat16),
    "decode_mma": (float16, bfloat16),
}


class Forced:
    """What is forced in this process, as an attribute that a patch can set back.

    A forked child gets its variables after this module is imported.
    """

    _words = None

    @property
    def words(self):
        return self._words or tuple(os.environ.get(name, "") for name in forced())

    @property
    def kernel(self):
        """For messages."""
        return f" (CLATTN_KERNEL={self.words[0]})" if self.words[0] else ""

    @words.setter
    def words(self, words):
        clattn._core.force(*words)
        self._words = words


def forced(kernel=None, *, local_memory=None):
    """Environment of a child process whose problems run as this variant; None forces nothing.

    Variants that the tests' own environment leaves out stay left out.
    """
    words = os.environ.get("CLATTN_KERNEL", "")
    return {
        "CLATTN_KERNEL": kernel or (words if words.startswith("-") else None),
        "CLATTN_LOCAL_MEMORY": local_memory,
    }


FORCED = Forced()


def force(monkeypatch, kernel=None, *, local_memory=None):
    """Force a variant in this process until the patch is undone; None forces nothing."""
    texts = forced(kernel, local_memory=local_memory).values()
    words = tuple("" if text is None else str(text) for text in texts)
    monkeypatch.setattr(FORCED, "words", words)


def variant_of(kernel, macros):
    """The word of CLATTN_KERNEL for a kernel. Three variants of attention share one."""
    word = kernel.removeprefix("attention_")
    if word == "cpu" or word.startswith("cpu_"):
        pairs, amx = macros["BFLOAT16_PAIRS"], macros["AMX"]
        return "amx" if amx else "pairs" if pairs else "cpu"
    return word


def weights_are_rounded(result, call):
    """Whether a variant that rounds weights to the result's dtype answers `call()`.

    A forced variant says so in the table. Otherwise the kernels that another call launches do.
    """
    word = FORCED.words[0]
    dtype = result.dtype
    if dtype not in (float16, bfloat16):
        return False
    if word and not word.startswith("-"):
        return dtype in ROUND_WEIGHTS.get(word.removesuffix("_emulated"), ())
    clattn._core.launched()
    call()
    variants = {variant_of(*entry[:2]) for entry in clattn._core.launched()}
    return any(dtype in ROUND_WEIGHTS.get(variant, ()) for variant in variants)


def factors_are_rounded(device, dtype, call):
    """Whether `call()`, a backward pass of the dtype, runs on matrix units, or their emulation."""
    word = FORCED.words[0]
    forced_mma = word.removesuffix("_emulated") == "mma"
    chosen = device.type != "cpu" and (not word or word.startswith("-"))
    if dtype not in (float16, bfloat16) or not (forced_mma or chosen):
        return False
    clattn._core.launched()
    call()
    return any(kernel == "attention_mma_backward" for kernel, *_ in clattn._core.launched())
