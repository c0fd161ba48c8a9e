"""Lets other libraries' training loops use `embrace_fx.compile` in place of DistributedDataParallel; each needs its
library: `pip install embrace-fx[integrations]`."""
