# SPDX-License-Identifier: MIT
"""The trial of a kernel before its first use: a driver that computes wrongly is found out.

The driver is that of a CPU, which says that it is a GPU, or has a name that clattn does not know.
"""

import pytest
from support.faults import open_with

pytestmark = [pytest.mark.cpus, pytest.mark.by_turns]

GPU = {"FAULTS_GPU": "1"}
UNKNOWN = {"FAULTS_UNKNOWN": "1", "CLATTN_TRIALS": "here"}

# The kernel of gradients, what says that it is used, and what in its text is wrong then.
WRONG = {
    "tiled": ("attention_tiled_backward", GPU,
              "weight * (grad - numbers[a].delta) * slope", "weight * grad * slope"),
    "tiled, a lost remainder": ("attention_tiled_backward", GPU,
                                "these = {at, min(at + BN, others.end)};",
                                "these = {at, at + BN}; if (at + BN > others.end) break;"),
    "cpu": ("attention_cpu_backward", UNKNOWN,
            "grad = weight * (grad - of->delta[v]) * scale;", "grad = weight * grad * scale;"),
    "cpu, blocks of keys": ("attention_cpu_backward", UNKNOWN,
                            "result[n] = adds ? result[n] + x : x;",
                            "result[n] = adds ? result[n] + x : x - x;"),
}  # fmt: skip

CALLS = """
import warnings
from support.data import draw, qkv
from support.gradients import check_backward, grads
from support.launches import launched_once

device = listed[index]
arrays = qkv((2, 3), 20, 50, 24)

def used(**options):
    "The kernels of gradients, without those of trials; what is told. The results are right."
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        launched = launched_once(check_backward, grads(*arrays), *arrays, device=device, **options)
    kernels = [one.kernel for one in launched if "backward" in one.kernel]
    return kernels, [str(one.message) for one in told]
"""


@pytest.mark.parametrize("fault", WRONG.values(), ids=WRONG)
def test_wrong_gradients(device, faults_library, tmp_path, fault):
    """The reference computes them. A warning says so once, also to calls with other programs.

    The forward pass keeps its kernel. A later process finds the fault anew.
    """
    kernel, env, text, instead = fault
    env = env | {"FAULTS_TEXT": text, "FAULTS_INSTEAD": instead, "XDG_CACHE_HOME": tmp_path}
    for _ in range(2):
        open_with(
            faults_library,
            device,
            CALLS
            + f"""
kernels, told = used(is_causal=True)
assert kernels[-1] == "attention_backward" and "{kernel}" in kernels, kernels
assert len(told) == 1, told
assert "cannot use the kernel '{kernel}'" in told[0] and "gives wrong results" in told[0], told
for options in {{"softcap": 2.0}}, {{"attn_mask": draw((20, 50))}}:
    kernels, told = used(**options)
    assert set(kernels) == {{"attention_backward"}} and not told, (kernels, told)
clattn._core.launched()
clattn.scaled_dot_product_attention(*arrays, device=device)
names = [name for name, _, _ in clattn._core.launched()]
assert "attention_reference" not in names, names
""",
            **env,
        )


def test_the_trial_of_gradients_is_kept(device, faults_library, tmp_path):
    """A process tries a kernel at its first use; the next one need not."""
    counts = []
    for _ in range(2):
        done = open_with(
            faults_library,
            device,
            CALLS
            + """
for _ in range(2):
    kernels, told = used()
    assert set(kernels) == {"attention_tiled_backward"} and not told, (kernels, told)
    print(len(kernels))
""",
            XDG_CACHE_HOME=tmp_path,
            **GPU,
        )
        counts.append([int(n) for n in done.stdout.split()])
    (first, second), later = counts
    assert first == 2 * second
    assert later == [second, second]


@pytest.mark.parametrize("word", ["tiled", "cpu"])
def test_a_forced_kernel_is_not_tried(device, faults_library, word):
    _, env, text, instead = WRONG[word]
    open_with(
        faults_library,
        device,
        CALLS
        + f"""
clattn._core.force("{word}")
try:
    used()
except AssertionError as error:
    assert "gradient of" in str(error)
else:
    raise SystemExit("the fault is not there")
""",
        FAULTS_TEXT=text,
        FAULTS_INSTEAD=instead,
        **env,
    )


@pytest.mark.parametrize(
    ("env", "function"), [(GPU, "multiply_pairs"), (UNKNOWN, "store_panels")], ids=["tiled", "cpu"]
)
def test_gradients_that_do_not_build(device, faults_library, tmp_path, env, function):
    """Without a trial too: the reference computes them, and a warning says so once."""
    for trials in ("here", "off"):
        open_with(
            faults_library,
            device,
            CALLS
            + f"""
faults.faults_define(b"{function}=goto")
kernels, told = used()
assert set(kernels) == {{"attention_backward"}}, kernels
assert len(told) == 1 and "_backward' does not build" in told[0], told
assert used()[1] == []
""",
            **env | {"CLATTN_TRIALS": trials, "XDG_CACHE_HOME": tmp_path / trials},
        )


@pytest.mark.parametrize("what", ["results", "gradients"])
def test_the_last_kernel(device, faults_library, tmp_path, what):
    """No kernel is in the place of a wrong reference: each call fails."""
    size, text, instead, call = {
        "results": (600, "sums[n] / l", "sums[n]",
                    "clattn.scaled_dot_product_attention(*arrays, device=device)"),
        "gradients": (300, "(pair->kept * sum - state->delta)", "(pair->kept * sum)",
                      "check_backward(grads(*arrays), *arrays, device=device)"),
    }[what]  # fmt: skip
    open_with(
        faults_library,
        device,
        CALLS
        + f"""
arrays = qkv((1, 2), 3, 5, {size})
for _ in range(3):
    try:
        {call}
    except clattn.DeviceError as error:
        assert "gives wrong results" in str(error), error
    else:
        raise SystemExit("no error")
assert faults.faults_planted() > 0
""",
        FAULTS_TEXT=text,
        FAULTS_INSTEAD=instead,
        XDG_CACHE_HOME=tmp_path,
        **UNKNOWN,
    )


@pytest.mark.parametrize(("code", "kernel"), [
    ("int8", "attention_decode_gpu"), ("float8_e4m3fn", "attention_decode_gpu"),
    ("int4", "attention_tiled"),
])  # fmt: skip
def test_the_first_call_has_codes(device, faults_library, tmp_path, code, kernel):
    """The trial has numbers in the place of codes, which mean nothing without their scales."""
    open_with(
        faults_library,
        device,
        f"""
import warnings
import numpy as np

warnings.simplefilter("error")
x = np.ones((1, 2, 40, 64), np.float32)
cache = clattn.KVCache(1, 2, 40, 64, dtype="{code}", device=listed[index])
cache.append(x, x)
np.testing.assert_allclose(cache.attend(x[:, :, :1]), 1, rtol=0.01)
names = [name for name, _, _ in clattn._core.launched()]
assert "{kernel}" in names and "attention_reference" not in names[-2:], names
""",
        XDG_CACHE_HOME=tmp_path,
        **GPU,
    )


def test_the_first_call_has_no_columns(device, faults_library, tmp_path):
    """Queries and keys without columns have the score 0: no kernel is taken to be wrong."""
    open_with(
        faults_library,
        device,
        """
import warnings
import numpy as np

warnings.simplefilter("error")
query, key = np.ones((1, 2, 3, 0)), np.ones((1, 2, 4, 0))
value = np.arange(32.0).reshape(1, 2, 4, 4)
output = clattn.scaled_dot_product_attention(query, key, value, device=listed[index])
np.testing.assert_allclose(output, np.broadcast_to(value.mean(2, keepdims=True), (1, 2, 3, 4)))
""",
        XDG_CACHE_HOME=tmp_path,
        **UNKNOWN,
    )
