"""What runs from one step into the next: ids, rows, row gradients, buckets."""
