# SPDX-License-Identifier: MIT
"""Head sizes that the tests share.

A program is built for each pair of head sizes, once for each dtype, option and number of rows or
heads that a kernel is compiled for: about two seconds with both CPU drivers. Lengths, strides and
batches are data and cost nothing. So a test takes its head sizes from here unless it is about
head sizes itself, and one in which keys and values differ takes WIDE with REST.
"""

SMALL = 8  # less than a vector: attention_decode_cpu does not take it
WIDE = 64  # whole vectors of every dtype
REST = 24  # a vector and a half of float32
