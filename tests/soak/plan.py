"""What a soak does: random loops, drawn from a seed, the same on all ranks, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from embrace_fx.vocabulary.schedule import ScheduleName

FAULTS = ("bad id", "label", "nan", "in the loss", "no backward", "forward", "backward", "evaluation", "loader")
"""What one rank alone does wrong, and what its script survives."""

DEEDS = {
    "update": 40,
    "update with clipping": 5,
    "accumulate": 5,
    "two backwards": 4,
    "no backward on any rank": 3,
    "evaluate": 5,
    "read the parameters": 3,
    "clamp the parameters": 2,
    "change the learning rate": 2,
    "keep a state": 3,
    "go back to it": 3,
    "ask for another plan": 1,
    **dict.fromkeys(FAULTS, 1),
}
"""With their weights."""

SCHEDULES: tuple[ScheduleName, ...] = ("2d", "2d", "vertical", "horizontal", "none")
STRATEGIES = ("alltoall", "alltoall", "auto", "allreduce", "mixed", "zen")
OPTIMIZERS = ("sgd", "momentum", "adagrad", "adam", "adamw")


@dataclass(frozen=True)
class Deed:
    """What a loop does with one batch.

    Attributes:
        rank: the one that a fault is of.
        step: the number of its batch.
        length: how many words an example of it has.
    """

    kind: str
    rank: int
    step: int
    length: int


@dataclass(frozen=True)
class Epoch:
    """A loop over batches.

    Attributes:
        ahead: it is read through `lookahead`.
        left_after: deeds after which it is left; as many as there are: it is not.
    """

    ahead: bool
    deeds: tuple[Deed, ...]
    left_after: int


@dataclass(frozen=True)
class Round:
    """A model's life."""

    seed: int
    schedule: ScheduleName
    strategy: str
    optimizer: str
    epochs: tuple[Epoch, ...]


def draw_round(seed: int, ranks: int, most_epochs: int) -> Round:
    random = Random(seed)
    epochs, step = [], 0
    for _ in range(random.randint((most_epochs + 1) // 2, most_epochs)):
        count = random.randint(3, 12)
        left_after = random.choice((count, count, count, random.randint(1, count)))
        kinds = random.choices(list(DEEDS), list(DEEDS.values()), k=count)
        # What a rank has given up is told at the next call: the reference's own messages must not come before it.
        kinds[left_after - 1] = "update"
        lengths = random.choices((3, 3, 3, 4, 6), k=count)
        deeds = tuple(
            Deed(kind, random.randrange(ranks), step + k, length)
            for k, (kind, length) in enumerate(zip(kinds, lengths, strict=True))
        )
        step += count
        epochs.append(Epoch(random.random() < 0.7, deeds, left_after))
    schedule, strategy, optimizer = random.choice(SCHEDULES), random.choice(STRATEGIES), random.choice(OPTIMIZERS)
    return Round(seed, schedule, strategy, optimizer, tuple(epochs))
