"""``python -m clattn bench``: clattn beside other implementations of attention, in one run."""
