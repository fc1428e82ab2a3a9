"""``python -m clattn tune``: find the best tiles for a device, by timing them."""
