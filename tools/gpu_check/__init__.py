# SPDX-License-Identifier: MIT
"""Checks clattn on a machine with a GPU and nothing else: see command.py."""
