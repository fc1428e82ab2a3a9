"""What the C core imports by name, and what clattn knows of the machine: devices, files."""
