"""Attention over parts of the keys, for processes and tasks."""
