# SPDX-License-Identifier: MIT
"""What goes between the host and a device that does not read the host's memory.

Child processes are in the mode "copy", most with the loader of faults.py, which counts.
"""

COUNTED = """
def counts(action):
    "Bytes that were sent and fetched, and kernels that ran."
    before = faults.faults_written(), faults.faults_fetched(), faults.faults_kernels()
    action()
    after = faults.faults_written(), faults.faults_fetched(), faults.faults_kernels()
    return tuple(b - a for a, b in zip(before, after))

"""


def test_everything_is_sent_and_fetched_once(run_with_faults):
    """Also where two kernels use it: parts of the keys and their merge, with present keys."""
    run_with_faults(
        COUNTED
        + """
row, past = (rng.standard_normal((1, 1, n, 64)).astype("f4") for n in (1, 8192))
inputs = row.nbytes + past.nbytes
assert counts(lambda: attend(row, past, past, device=device)) == (inputs, row.nbytes, 2)

from clattn import onnx
with clattn.use_device(device):
    call = lambda: onnx.attention(row, row + 1, row + 2, past_key=past, past_value=past + 1)
    inputs, results = 3 * row.nbytes + 2 * past.nbytes, 3 * row.nbytes + 2 * past.nbytes
    assert counts(call) == (inputs, results, 2), (counts(call), inputs, results)
""",
        CLATTN_MEMORY="copy",
        CLATTN_KERNEL="decode",
    )
