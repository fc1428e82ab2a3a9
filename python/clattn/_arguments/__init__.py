"""Arguments that several modules read: operands, whole numbers, dtypes, devices."""
