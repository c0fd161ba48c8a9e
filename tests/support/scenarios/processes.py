"""What loops hand to workers, pools and children of a process that trains."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

import embrace_fx
from tests.support.scenario import Training
from tests.support.scenarios.modes import in_a_child
from tests.support.scenarios.schemes import NUM_IDS, Words, adam, ids_of, scheme, step_of, stepped, train, wrapped


class _Mined(Dataset[tuple[Tensor, Tensor]]):
    """Items that the weights of dense layers choose."""

    def __init__(self, plain: Any, rank: int) -> None:
        self.plain, self.rank = plain, rank

    def __len__(self) -> int:
        return 8

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        hardest = int((self.plain.hidden.weight.detach().sum(1) * (k + 1)).argmax())
        return (ids_of(self.rank, k, 3) + hardest) % NUM_IDS, self.plain.out.bias.detach().clone()


class _Streamed(IterableDataset[Tensor]):
    def __init__(self, plain: Any, rank: int) -> None:
        self.plain, self.rank = plain, rank

    def __iter__(self) -> Any:
        for k in range(4):
            yield (ids_of(self.rank, k, 3) + int(self.plain.norm.weight.sum() * 10)) % NUM_IDS


@scheme
def items_mined_by_workers(training: Training) -> None:
    plain, model = wrapped(training)
    optimizer = adam(training, model)
    for _ in range(2):
        loader = DataLoader(_Mined(plain, training.rank), 4, num_workers=1, multiprocessing_context="fork")
        for ids, bias in loader:
            step_of(training, optimizer, (model(ids) + bias).square().mean())


@scheme
def workers_that_stay_over_epochs(training: Training) -> None:
    plain, model = wrapped(training)
    optimizer = adam(training, model)
    stream, how = _Streamed(plain, training.rank), {"multiprocessing_context": "fork", "persistent_workers": True}
    loader = DataLoader(stream, 2, num_workers=1, **how)  # type: ignore[arg-type]
    for _ in range(2):
        for ids in loader:
            step_of(training, optimizer, model(ids).square().mean())


def _score(weights: list[Any]) -> float:
    return float(sum(each.sum() for each in weights))


@scheme
def scores_by_a_pool_of_processes(training: Training) -> None:
    """The pool is forked after the first step, and is given arrays."""
    plain, model = wrapped(training)
    optimizer = adam(training, model)
    train(training, model, optimizer, range(1))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        for k in range(1, 4):
            train(training, model, optimizer, range(k, k + 1))
            arrays = [each.detach().numpy().copy() for each in (plain.hidden.weight, plain.out.weight)]
            training.note(pool.submit(_score, arrays).result(timeout=60))


@scheme
def an_evaluation_of_a_whole_copy_in_a_child(training: Training) -> None:
    """Every rank asks for all weights; a child of each loads them into a plain model."""
    alone = Words()
    for _, _, model in stepped(training, 3):
        alone.load_state_dict({n.removeprefix("module."): v for n, v in embrace_fx.full_state_dict(model).items()})
        training.note(in_a_child(lambda: alone(ids_of(0, 9)).sum().item()))


@scheme
def a_sum_in_a_child_that_is_forked_by_hand(training: Training) -> None:
    for _, plain, _ in stepped(training, 3):
        reads, writes = os.pipe()
        if not (child := os.fork()):
            os.write(writes, str(plain.hidden.weight.sum().item()).encode())
            os._exit(0)
        os.waitpid(child, 0)
        training.note(float(os.read(reads, 100)))
        os.close(reads)
        os.close(writes)


@scheme
def dense_norms_in_a_child_of_one_rank(training: Training) -> None:
    plain, model = wrapped(training)
    optimizer = adam(training, model)
    context = multiprocessing.get_context("fork")
    for k in range(4):
        train(training, model, optimizer, range(k, k + 1))
        if training.rank == k % 2:
            with context.Pool(1) as pool:
                training.note(pool.apply_async(_score, ([plain.hidden.weight.detach().numpy()],)).get(timeout=60))
