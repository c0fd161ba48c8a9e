"""A tanh RNN trained by ADMM, without a learning rate: run it with python, or with torchrun on any number of ranks."""

import torch
from torch import distributed, nn

from embrace_fx import admm

WORDS, STEPS = 8, 6


def sentences(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of fixed values, one-hot (B, N, I), and whether a sentence's sum is positive, (B,)."""
    words = torch.randint(WORDS, (count, STEPS), generator=torch.Generator().manual_seed(seed))
    values = torch.linspace(-1, 1, WORDS)
    return nn.functional.one_hot(words, WORDS).float(), (values[words].sum(1) > 0).long()


rank, ranks, parallel = 0, 1, None
if distributed.is_torchelastic_launched():
    distributed.init_process_group("gloo")
    rank, ranks, parallel = distributed.get_rank(), distributed.get_world_size(), admm.Synchronous()

rnn, head = nn.RNN(WORDS, 32, batch_first=True), nn.Linear(32, 2)
inputs, classes = sentences(600, seed=0)
state = admm.train(
    rnn,
    head,
    (inputs[rank::ranks], classes[rank::ranks]),
    iterations=20,
    parallel=parallel,
)

if rank == 0:
    for progress in state.history[::4]:
        print(f"iteration {progress.iteration:3d}  loss {progress.loss:.3f}  accuracy {progress.accuracy:.3f}")
    inputs, classes = sentences(600, seed=1)
    with torch.no_grad():
        states, _ = rnn(inputs)
        right = (head(states[:, -1]).argmax(1) == classes).float().mean()
    print(f"best iteration {state.best.iteration}, accuracy on new sentences {right:.3f}")
if distributed.is_initialized():
    distributed.destroy_process_group()
