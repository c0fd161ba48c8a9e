"""One compiled model's life: calls, captures, programs, and what runs between two calls."""
