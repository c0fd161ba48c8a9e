"""Systems compared on ranks with limited links."""
