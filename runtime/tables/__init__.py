"""Where a rank's part of each table lies, and how optimizers update it."""
