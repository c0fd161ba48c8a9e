"""Tables beyond memory: a working set of rows in memory, all others in a file, or in a device's host."""
