"""Everything there is to measure with one GPU, in one call of less than nine minutes.

    python -m benchmarks.gpu              # on a GPU; results in benchmarks/results
    python -m benchmarks.gpu --dry-run    # the whole control flow on a CPU, tiny sizes, times that mean nothing

Sections run one after another, each in a process of its own with a time limit: one that fails, or poisons its CUDA
context, or hangs, is reported with its traceback, and the others still run. What a section has found by then is kept.

| section | says |
|---|---|
| environment | what ran: versions, GPU, the bandwidth of a copy, which is the floor of every kernel |
| kernels | each Triton kernel against its float64 reference, and its share of that bandwidth |
| parity | the five lab models, trained on the GPU, against the CPU |
| steps | one GPU at `paper` size: eager, `torch.compile`, DDP of one rank, embrace_fx; whether the host waits |
| sharing | 2 and 4 processes on the one GPU over gloo: losses against DDP's, and overlap |
| fabric | *emulated*: one real rank of N whose collectives take the cost model's time (`emulated.py`) |
| trace | a profiler trace and the timeline's page of the emulated 2d step |
"""
