# SPDX-License-Identifier: MIT
"""Machine code of the kernels for GPUs that this machine does not have: see __main__.py."""
