"""Other people's training loops, with `embrace_fx.compile` where they put DistributedDataParallel; each needs its
library: `pip install embrace-fx[integrations]`."""
