"""What caches are made of: pages, and how rows are kept in them."""
