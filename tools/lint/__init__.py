# SPDX-License-Identifier: MIT
"""The project's own rules of style and structure, which are read off the text of its files."""
