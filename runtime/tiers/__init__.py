"""Tables beyond memory: a working set of rows in memory, and the other rows in a file or, for CUDA, in host memory."""
