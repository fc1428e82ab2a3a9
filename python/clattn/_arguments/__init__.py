"""Arguments that several modules read: arrays, whole numbers, dtypes, devices."""
