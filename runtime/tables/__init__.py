"""Where a rank's part of each table lies."""
