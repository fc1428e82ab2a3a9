"""Arguments of calls: types of arrays, whole numbers."""
