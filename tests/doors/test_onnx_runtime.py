# SPDX-License-Identifier: MIT
"""clattn.onnx.attention beside ONNX Runtime, an implementation that others wrote.

Cases that the runtime takes, where it follows the corrected text. Release 1.31 differs in this:

- Attention refuses bfloat16, a V of another type than Q, masks of rank 1, short masks, masks that
  broadcast over rows or keys, and empty dimensions. It takes opset 25 for 24, without windows.
- It computes float64 in float32, so float64 is not compared. Mode 2 shows finfo.min where the
  text has -inf: such entries are compared as -inf.
- A NaN in a masked key makes its whole row NaN, against docs/operators/onnx_attention.md.
- It does not know the operator as first published: softcap before the mask, causality offset by
  the past.
"""

from functools import cache as once

import clattn
import numpy as np
import pytest
from references.attention import float16, float32, max_error
from references.onnx import attention, overflowed, tolerances
from support.checks import assert_close
from support.onnx_calls import HQ, B, cache, check_present, flat, inputs, mask_of
from support.onnx_model import run_model

pytestmark = pytest.mark.usefixtures("reference_kernel")

L, S, P = 17, 33, 13
NAMES = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")


def runtime_attention(args, options, return_qk):
    """Y, present_key, present_value, qk_matmul_output; None where there is none."""
    arrays = dict(zip(NAMES, [*args, *[None] * (7 - len(args))], strict=True))
    with_past = arrays["past_key"] is not None
    present = ["present_key", "present_value"] if with_past else ["", ""]
    outputs = ["Y", *present, "qk_matmul_output" if return_qk else ""]
    while not outputs[-1]:
        outputs.pop()
    got = run_model("Attention", arrays, outputs, **options)
    return got + [None] * (4 - len(got))


def agree(device, args, options, theirs, runs):
    """Runtime and clattn: no further apart than the runtime from the oracle plus what we may be.

    The runtime itself has to be near the oracle, or there is no witness: as near as the plain
    computation in the type that it computes in, which for float16 is float16.
    """
    right, ours = attention(*args, **options), tolerances(*args, **options)
    allowed = tolerances(*args, compute=args[0].dtype, **options)
    got = clattn.onnx.attention(*args, **options, **runs, device=device)
    check_present(got, right, with_past=len(args) > 4 and args[4] is not None)
    pairs = [(got.Y, theirs[0], right.Y, allowed.Y, ours.Y.each)]
    if runs:
        right_qk = overflowed(right.qk_matmul_output, args[0].dtype)
        lowest = theirs[3] == np.finfo(theirs[3].dtype).min
        theirs_qk = np.where(lowest, -np.inf, theirs[3]).astype(theirs[3].dtype)
        pairs.append((got.qk_matmul_output, theirs_qk, right_qk, allowed.qk, ours.qk))
    for mine, other, oracle, near, tolerance in pairs:
        assert_close(other, oracle, near, "the runtime")
        error = max_error(other, oracle)
        assert_close(mine, other.astype(oracle.dtype), error + tolerance, "clattn")


MASK, SEEN = mask_of(float32, (L, S)), mask_of(np.dtype(bool), (L, S))
EMPTY = SEEN.copy()
EMPTY[::4] = False
LENGTHS = [None, None, None, np.array([20, 9])]
CASES = {  # opset, arguments, options
    "plain": (23, inputs(), {}),
    "Ev": (23, inputs(Ev=5), {}),
    "MHA": (23, inputs(heads=(3, 3)), {}),
    "MQA": (23, inputs(heads=(5, 1)), {}),
    "one query": (23, inputs(1, 200), {}),
    "many keys": (24, inputs(40, 200), {"is_causal": 1}),
    "scale": (23, inputs(), {"scale": 0.3}),
    "softcap": (23, inputs(), {"softcap": 0.7}),
    "causal": (23, inputs(), {"is_causal": 1}),
    "causal, more queries than keys": (24, inputs(40, 13), {"is_causal": 1}),
    "float mask": (23, (*inputs(), MASK), {}),
    "float mask of heads": (24, (*inputs(), mask_of(float32, (HQ, L, S))), {"is_causal": 1}),
    "float mask of batches": (24, (*inputs(), mask_of(float32, (B, 1, L, S))), {}),
    "bool mask with empty rows": (23, (*inputs(), EMPTY), {}),
    "bool mask and causal": (23, (*inputs(), SEEN), {"is_causal": 1}),
    "mask and softcap": (24, (*inputs(), MASK), {"softcap": 0.7}),
    "int32 mask": (23, (*inputs(), mask_of(np.dtype(np.int32), (L, S))), {}),
    "uint8 mask": (24, (*inputs(), mask_of(np.dtype(np.uint8), (L, S))), {}),
    "past": (23, (*inputs(), None, *cache()), {}),
    "past and causal": (23, (*inputs(), None, *cache()), {"is_causal": 1}),
    "past, mask and causal": (24, (*inputs(), mask_of(float32, (L, S + P)), *cache()),
                              {"is_causal": 1}),
    "no past to speak of": (24, (*inputs(), None, *cache(0)), {"is_causal": 1}),
    "lengths": (24, (*inputs(), *LENGTHS), {}),
    "lengths and causal": (24, (*inputs(), *LENGTHS), {"is_causal": 1}),
    "lengths, mask and causal": (24, (*inputs(), SEEN, *LENGTHS[1:]), {"is_causal": 1}),
    "float16": (23, inputs(dtype=float16), {}),
    "float16, past and causal": (23, (*inputs(dtype=float16), None, *cache(dtype=float16)),
                                 {"is_causal": 1}),
    "softmax_precision": (23, inputs(), {"softmax_precision": 1}),
}  # fmt: skip
OUTPUTS = {
    "nothing": (inputs(), {}),
    "mask and softcap": ((*inputs(), MASK), {"softcap": 0.7}),
    "past and causal": ((*inputs(), None, *cache()), {"is_causal": 1}),
    "lengths, mask, causal": ((*inputs(), EMPTY, *LENGTHS[1:]), {"is_causal": 1}),
}


@once
def theirs(name, rank):
    """The runtime's answers, which it computes once and not for every device."""
    opset, args, options = CASES[name]
    if rank == 3:
        args, counts = flat(args, (args[0].shape[1], args[1].shape[1]))
        options = options | counts
    options = options | {"opset": opset}
    return args, options, runtime_attention(args, options, return_qk=False)


@pytest.mark.parametrize("name", CASES)
def test_attention(device, name):
    agree(device, *theirs(name, 4), {})


@pytest.mark.parametrize("name", ["plain", "Ev", "MQA", "past and causal", "float16"])
def test_attention_with_three_dimensions(device, name):
    agree(device, *theirs(name, 3), {})


@pytest.mark.parametrize("mode", range(4), ids="mode{}".format)
@pytest.mark.parametrize("case", OUTPUTS.values(), ids=OUTPUTS)
def test_qk_matmul_output(device, case, mode):
    args, options = case
    options = options | {"opset": 24, "qk_matmul_output_mode": mode}
    answer = runtime_attention(args, options, return_qk=True)
    agree(device, args, options, answer, {"return_qk": True})
