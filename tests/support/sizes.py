# SPDX-License-Identifier: MIT
"""Head sizes that the tests share.

In kernels for GPUs, which tests run on CPUs too, each pair of head sizes is a program of its own,
which takes a CPU driver 2 to 30 seconds to build. In kernels for CPUs head sizes are data, as
lengths, strides and batches are in all kernels, and cost nothing. So a test takes its head sizes
from here unless it is about head sizes itself, and a test in which the head sizes of keys and
values differ takes WIDE with REST.
"""

SMALL = 8  # less than a vector: attention_decode_cpu does not take it
WIDE = 64  # whole vectors of every dtype
REST = 24  # a vector and a half of float32
