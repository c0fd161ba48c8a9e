"""Tables larger than memory: some rows are in memory (the working set), the others in a file or, for CUDA, in host
memory.
"""
