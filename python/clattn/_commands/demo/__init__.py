"""The command ``demo``."""
