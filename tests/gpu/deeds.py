"""What users do besides plain steps, on ranks that train on the host over gloo or on a device each over NCCL.

Each deed is a function of a rank that returns values of the host: where they are the same on both, the device did what
the CPU does, which the other tests compare with references.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adagrad

import embrace_fx
from embrace_fx.vocabulary.plan import Grid
from tests.support.drifting import LINKS, ROWS, SPARSE_AGAIN, TABLE, every_call_a_sample, make
from tests.support.drifting import batch as drifting_batch
from tests.support.models import MODELS, Batch
from tests.support.training import SEED, whole

Found = dict[str, Any]
WORKLOAD = dict(MODELS)["two_table_lm"]


def device_of(kind: str, rank: int) -> torch.device:
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank)
    if kind == "cuda":
        torch.cuda.set_device(device)
    return device


class Training:
    """A compiled model, its optimizer, and its batches."""

    def __init__(self, rank: int, kind: str, model: nn.Module | None = None, **options: Any) -> None:
        self.rank, self.device = rank, device_of(kind, rank)
        model = (model or WORKLOAD.make(torch.float64, seed=SEED + rank)).to(self.device)
        self.optimizer = Adagrad(model.parameters(), lr=0.05, eps=1e-3)
        group = dist.group.WORLD if kind == "cpu" else dist.new_group(backend="nccl")
        options = {"strategy": "alltoall"} | options
        self.model = embrace_fx.compile(model, optimizer=self.optimizer, process_group=group, **options)

    def batches(self, steps: Iterable[int]) -> Iterable[Batch]:
        loaded = [WORKLOAD.batches(step, self.rank, SEED) for step in steps]
        return self.model.lookahead([tuple(each.to(self.device) for each in batch) for batch in loaded])

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: Iterable[int]) -> None:
        for batch in self.batches(steps):
            self.model(*batch).backward()
            self.step()

    def parameters(self) -> Found:
        shown = self.model.state_dict()
        return on_host(whole((name, shown[name]) for name, _ in self.model.named_parameters()))


def on_host(values: dict[str, Tensor]) -> Found:
    return {name: value.detach().cpu() for name, value in values.items()}


def accumulates(rank: int, world_size: int, kind: str) -> Found:
    training = Training(rank, kind)
    for number, batch in enumerate(training.batches(range(12))):
        if number % 3 < 2:
            with training.model.no_sync():
                training.model(*batch).backward()
            continue
        training.model(*batch).backward()
        training.step()
    return training.parameters()


def clips(rank: int, world_size: int, kind: str) -> Found:
    training, norms = Training(rank, kind), []
    for batch in training.batches(range(6)):
        training.model(*batch).backward()
        norms.append(training.model.clip_grad_norm_(0.05).cpu())
        training.step()
    return training.parameters() | {"norms": torch.stack(norms)}


def returns_to_a_checkpoint(rank: int, world_size: int, kind: str) -> Found:
    training = Training(rank, kind)
    training.train(range(4))
    saved = deepcopy([embrace_fx.full_state_dict(each) for each in (training.model, training.optimizer)])
    training.train(range(4, 7))
    training.model.load_state_dict(saved[0])
    training.optimizer.load_state_dict(saved[1])
    training.train(range(7, 10))
    return training.parameters()


def reads_one_parameter(rank: int, world_size: int, kind: str, of_gradient: bool = False) -> Found:
    training = Training(rank, kind)
    training.train(range(2))
    bias = next(p for p in training.model.parameters() if p.dim() == 1)
    seen = []
    for batch in training.batches(range(2, 10)):
        training.model(*batch).backward()
        if of_gradient:
            assert bias.grad is not None
            seen.append(bias.grad.sum().cpu())
        training.step()
        if not of_gradient:
            seen.append(bias.detach().sum().cpu())
    return training.parameters() | {"seen": torch.stack(seen)}


def reads_one_gradient(rank: int, world_size: int, kind: str) -> Found:
    """Reads a gradient early: its bucket and the delayed gradients are launched before the next forward's late rows."""
    return reads_one_parameter(rank, world_size, kind, of_gradient=True)


def trains_on_a_grid(rank: int, world_size: int, kind: str) -> Found:
    """Shards tables by rows and columns: two row parts, and two column parts if there are four ranks."""
    training = Training(rank, kind, strategy=Grid(2, world_size // 2))
    training.train(range(8))
    return training.parameters()


def has_a_default_device(rank: int, world_size: int, kind: str) -> Found:
    """Sets a default device for the loop. Tensors that the library creates for itself must not be affected."""
    model = WORKLOAD.make(torch.float64, seed=SEED + rank)
    with device_of(kind, rank):
        training = Training(rank, kind, model)
    batches = training.batches(range(6))
    with training.device:
        for batch in batches:
            training.model(*batch).backward()
            training.step()
        return training.parameters()


def evaluates(rank: int, world_size: int, kind: str) -> Found:
    training, losses = Training(rank, kind), []
    held_out = [tuple(each.to(training.device) for each in WORKLOAD.batches(99, rank, SEED))]
    for number, batch in enumerate(training.batches(range(8))):
        training.model(*batch).backward()
        training.step()
        if number % 3 == 1:
            training.model.eval()
            with torch.no_grad():
                losses += [training.model(*each).cpu() for each in held_out]
            training.model.train()
    return training.parameters() | {"losses": torch.stack(losses)}


def plans_anew(rank: int, world_size: int, kind: str) -> Found:
    """Changes the share of the table that batches read: the table's strategy changes, and changes back."""
    training = Training(rank, kind, make(seed=rank), strategy="auto", cluster=LINKS)
    plans = []
    batches = [tuple(each.to(training.device) for each in drifting_batch(k, rank)) for k in range(SPARSE_AGAIN.stop)]
    with every_call_a_sample():
        for batch in training.model.lookahead(batches):
            training.model(*batch).backward()
            training.step()
            plans.append(training.model.plan[TABLE].strategy)
    changes = [one for one, other in zip(plans, [None, *plans], strict=False) if one != other]
    return training.parameters() | {"changes": changes}


def joins(rank: int, world_size: int, kind: str) -> Found:
    training = Training(rank, kind)
    for epoch in range(2):
        with training.model.join():
            for step in range(2 + 3 * (rank == epoch)):
                batch = [each.to(training.device) for each in WORKLOAD.batches(10 * epoch + step, rank, SEED)]
                training.model(*batch).backward()
                training.step()
    return training.parameters()


def fails_on_one_rank(rank: int, world_size: int, kind: str) -> Found:
    """Reads an invalid id on rank 1: the step fails on every rank, and later steps succeed."""
    table = nn.EmbeddingBag(50, 4, mode="sum", dtype=torch.float64)
    with torch.no_grad():
        table.weight.copy_(torch.arange(200.0).view(50, 4).sin())
    training = Training(rank, kind, table)
    draw = torch.Generator().manual_seed(rank)
    batches = [(torch.randint(50, (6,), generator=draw), torch.tensor([0, 3])) for _ in range(6)]
    if rank == 1:
        batches[3][0][2] = 50
    failed = []
    loaded = [tuple(each.to(training.device) for each in batch) for batch in batches]
    for step, batch in enumerate(training.model.lookahead(loaded)):
        try:
            training.model(*batch).square().sum().backward()
        except embrace_fx.PeerFailure as failure:
            failed.append((step, sorted(failure.by_rank)))
            continue
        training.step()
    return training.parameters() | {"failed": failed}


def has_a_budget(rank: int, world_size: int, kind: str) -> Found:
    """Sets a memory budget below the step's peak: values are recomputed or, on a device, offloaded."""
    training = Training(rank, kind, _deep(rank), memory_budget=0.8)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(4):
        ids = torch.randint(ROWS, (4, 6), generator=draw).to(training.device)
        training.model(ids).square().sum().backward()
        training.step()
    return training.parameters()


def _deep(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16))]
    return nn.Sequential(nn.Embedding(ROWS, 16), *layers).double()


def stands_still(rank: int, world_size: int, kind: str) -> Found:
    """Delays one rank at a time, before a forward or a backward, for longer than the launcher waits for a launch."""
    training = Training(rank, kind)
    for number, batch in enumerate(training.batches(range(6))):
        if number >= 2 and number % world_size == rank:
            time.sleep(1.2)
        loss = training.model(*batch)
        if number >= 3 and (number + 1) % world_size == rank:
            time.sleep(1.2)
        loss.backward()
        training.step()
    return training.parameters()


def reads_on_one_rank(rank: int, world_size: int, kind: str) -> Found:
    """Waits for replicas on rank 0, while the other ranks wait for rank 0 in a barrier."""
    training = Training(rank, kind)
    for number, batch in enumerate(training.batches(range(8))):
        training.model(*batch).backward()
        training.step()
        if number in (3, 6):
            if rank == 0:
                training.model.synchronize()
                [each.cpu() for name, each in training.model.module.named_parameters() if "rnn" in name]
            dist.barrier()
    return training.parameters()


def reads_in_every_step(rank: int, world_size: int, kind: str) -> Found:
    """Copies dense parameters after each step without waiting: rows that were sent too early are sent again."""
    training, copies = Training(rank, kind), []
    for batch in training.batches(range(8)):
        training.model(*batch).backward()
        training.step()
        copies.append({name: value.detach().clone() for name, value in training.model.module.named_parameters()})
    kept = {f"{name} {step}": value for step, copied in enumerate(copies) for name, value in copied.items()}
    return training.parameters() | on_host({name: value for name, value in kept.items() if "rnn" in name})


class _Critic(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.ids = nn.Embedding(60, 4, dtype=torch.float64)
        self.score = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        return (self.score(self.ids(ids)).mean() - scale).square()


def trains_two_models(rank: int, world_size: int, kind: str, reads: str = "") -> Found:
    """Trains two models on one device. Each loss reads the current parameters of the other model."""
    training, seen = Training(rank, kind), list[Tensor]()
    critic = _Critic(rank).to(training.device)
    optimizer = SGD(critic.parameters(), lr=0.1)
    group = training.model.process_group
    judging = embrace_fx.compile(critic, optimizer=optimizer, process_group=group, strategy="alltoall")
    biases = critic.score.bias, next(p for p in training.model.parameters() if p.dim() == 1)

    def read(*_: Tensor) -> None:
        seen.extend(bias.grad.sum().detach().cpu() for bias in biases if bias.grad is not None)

    for number, batch in enumerate(training.batches(range(6))):
        first = training.model(*batch)
        if reads == "within one backward":
            first.register_hook(read)  # runs between the critic's backward and the model's own
            judging(batch[0], first).backward()
        else:
            second = judging(batch[0], first.detach())
            for loss in (second, first) if number % 2 else (first, second):
                loss.backward()
                if reads == "after each" or (reads == "after each on one rank" and rank == 1):
                    read()
            if reads == "after both":
                read()
        training.step()
        optimizer.step()
        optimizer.zero_grad()
    shown = embrace_fx.full_state_dict(judging)
    found = {f"critic {name}": value for name, value in shown.items()} | {f"seen {k}": s for k, s in enumerate(seen)}
    return training.parameters() | on_host(found)


def reads_between_two_calls(rank: int, world_size: int, kind: str) -> Found:
    """Runs the backward of two calls. A hook reads the gradients of the first call before the second one begins."""
    training, seen = Training(rank, kind), list[Tensor]()
    bias = next(p for p in training.model.parameters() if p.dim() == 1)

    def read(_: Tensor) -> None:
        assert bias.grad is not None
        seen.append(bias.grad.sum().detach().cpu())

    for step in range(6):
        first, second = (
            training.model(*[each.to(training.device) for each in WORKLOAD.batches(10 * step + k, rank, SEED)])
            for k in range(2)
        )
        first.register_hook(read)
        (first + second).backward()
        training.step()
    return training.parameters() | {"seen": torch.stack(seen)}


def reads_within_a_backward(rank: int, world_size: int, kind: str) -> Found:
    """Reads, in a hook, a gradient of the model whose backward has ended, before the other model's backward begins."""
    return trains_two_models(rank, world_size, kind, reads="within one backward")


def reads_after_each_backward(rank: int, world_size: int, kind: str) -> Found:
    """Reads the gradients of both models after each of the two backwards."""
    return trains_two_models(rank, world_size, kind, reads="after each")


def reads_after_each_backward_on_one_rank(rank: int, world_size: int, kind: str) -> Found:
    """Reads gradients on one rank, while the other rank enqueues the launches of the second model."""
    return trains_two_models(rank, world_size, kind, reads="after each on one rank")


def reads_after_both_backwards(rank: int, world_size: int, kind: str) -> Found:
    """What leaves out of turn for the first model has been submitted before what the second one has launched."""
    return trains_two_models(rank, world_size, kind, reads="after both")


DEEDS: tuple[Callable[[int, int, str], Found], ...] = (
    accumulates,
    clips,
    returns_to_a_checkpoint,
    reads_one_parameter,
    reads_one_gradient,
    trains_on_a_grid,
    has_a_default_device,
    evaluates,
    plans_anew,
    joins,
    fails_on_one_rank,
    has_a_budget,
    stands_still,
    reads_on_one_rank,
    reads_in_every_step,
    trains_two_models,
    reads_between_two_calls,
    reads_within_a_backward,
    reads_after_each_backward,
    reads_after_each_backward_on_one_rank,
    reads_after_both_backwards,
)
