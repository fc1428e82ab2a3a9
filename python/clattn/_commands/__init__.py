"""The commands of ``python -m clattn``."""
