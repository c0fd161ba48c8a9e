"""What loops do with the values of state dicts beyond saving them: beside DDP on the same ranks, or refused on all."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import embrace_fx
from embrace_fx.runtime.ranks.failure import PeerFailure
from embrace_fx.runtime.tables.table_shard import TableShard
from embrace_fx.vocabulary.plan import Grid
from tests.support.parts import differs, whole_of
from tests.support.ranks import run_ranks
from tests.support.scenario import compiled_once
from tests.support.tagger import ROWS, WIDTH, Tagger, batch_of

STEPS = 6
TABLE = "emb.weight"
State = dict[str, Any]
Loop = Callable[["Training", int], None]
"""What is done after a step of this number."""


class Training:
    """Training of a model that is compiled, or wrapped by DDP.

    Attributes:
        kept: what a loop keeps from step to step.
        log: what it logs.
    """

    def __init__(self, rank: int, wrap: Callable[[nn.Module], Any]) -> None:
        torch.manual_seed(0)
        plain = Tagger().double()
        self.rank, self.kept = rank, dict[str, Tensor]()
        self.copied = copy.deepcopy(plain)
        self.model = wrap(plain)
        self.optimizer: Optimizer = AdamW(self.model.parameters(), 0.02, eps=1e-3)
        self.log: list[Any] = []

    def step(self, number: int) -> None:
        self.model(*batch_of(number, self.rank)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> State:
        """The state dict of the model."""
        return self.model.module.state_dict()

    @property
    def moments(self) -> dict[str, Tensor]:
        """The tensors of the optimizer's state dict."""
        state = self.optimizer.state_dict()["state"]
        return {f"{number} {key}": v for number, of in state.items() for key, v in of.items() if v.dim()}

    def ends(self) -> Any:
        """Returns all results of a loop, with shards gathered into whole tensors. Collective."""
        whole = [{name: value.clone() for name, value in embrace_fx.full_state_dict(self.model.module).items()}]
        return whole_of([self.log, whole, self.kept, dict(self.copied.state_dict())])


def _asked(ask: Callable[[Tensor], Any]) -> Loop:
    """Returns a loop that applies `ask` to every value of the model's and the optimizer's state dicts."""

    def loop(training: Training, number: int) -> None:
        training.log += [ask(value) for value in (*training.state.values(), *training.moments.values())]

    return loop


@torch.no_grad()
def _set_averages(training: Training, number: int) -> None:
    for average, value in zip(training.copied.state_dict().values(), training.state.values(), strict=True):
        average.copy_(0.9 * average + 0.1 * value.cpu())


@torch.no_grad()
def _foreach_averages(training: Training, number: int) -> None:
    averages = list(training.copied.state_dict().values())
    torch._foreach_lerp_(averages, list(training.state.values()), 0.1)
    torch._foreach_mul_(averages, 0.99)
    torch._foreach_add_(averages, list(training.state.values()), alpha=0.01)


@torch.no_grad()
def _kept_averages(training: Training, number: int) -> None:
    for name, value in training.state.items():
        if number == 0:
            training.kept[name] = value.detach().clone()
        else:
            training.kept[name].lerp_(value, 0.1)


@torch.no_grad()
def _averages_out(training: Training, number: int) -> None:
    for own, target in zip(training.model.module.parameters(), training.copied.parameters(), strict=True):
        target.data.mul_(0.9)
        torch.add(target.data, own.data, alpha=0.1, out=target.data)


@torch.no_grad()
def _averages_out_of_parts(training: Training, number: int) -> None:
    for name, value in training.state.items():
        kept = training.kept.setdefault(name, torch.zeros_like(value))
        torch.add(kept, value, alpha=0.1, out=kept)


@torch.no_grad()
def _swapped_averages(training: Training, number: int) -> None:
    _kept_averages(training, number)
    back = copy.deepcopy(training.state)
    training.model.module.load_state_dict(training.kept)
    training.model.eval()
    training.log.append(training.model(*batch_of(77, training.rank)))
    training.model.train()
    training.model.module.load_state_dict(back)


def _targets(of: Callable[[Tensor], Tensor]) -> Loop:
    """Returns a loop with a plain target network that copies the model's state and is called."""

    def loop(training: Training, number: int) -> None:
        training.copied.load_state_dict({name: of(value) for name, value in training.state.items()})
        with torch.no_grad():
            training.log.append(training.copied(*batch_of(5, training.rank)))

    return loop


def _sums(training: Training, number: int) -> None:
    for name, value in training.state.items():
        training.kept[name] = training.kept[name] + value if name in training.kept else value.clone()
    if number == STEPS - 1:
        training.model.module.load_state_dict({name: value / STEPS for name, value in training.kept.items()})


@torch.no_grad()
def _into_whole_tensors(training: Training, number: int) -> None:
    table, kept = training.state[TABLE], training.kept
    if number == 0:
        kept |= {"most": torch.zeros(ROWS, WIDTH).double(), "some": torch.zeros(5, WIDTH).double()}
        kept |= {"column": torch.zeros(ROWS).double()}
    torch.maximum(kept["most"], table.abs(), out=kept["most"])
    kept["most"].addcmul_(table, table, value=0.1)
    kept["most"][table > 0.5] = 0
    kept["some"][:3] = table[10:13]
    kept["some"][torch.tensor([3, 4])] = table[torch.tensor([3, 9])]
    kept["column"].copy_(table[:, 3]).add_(table.norm(dim=1))


def _history_of_gradients(training: Training, number: int) -> None:
    training.model(*batch_of(50 + number, training.rank)).backward()
    history = training.kept.setdefault("history", torch.zeros(ROWS, WIDTH).double())
    history.mul_(0.9).add_(training.model.module.emb.weight.grad, alpha=0.1)


LOOPS: Mapping[str, Loop] = {
    "norms": _asked(lambda v: v.norm().item()),
    "sums of a cast": _asked(lambda v: v.to(torch.bfloat16).sum().item()),
    "means of a cast": _asked(lambda v: v.half().mean().item()),
    "spreads": _asked(lambda v: [v.std(), v.double().std(0)]),
    "extremes": _asked(lambda v: [v.max().item(), v.min().item(), v.abs().amax()]),
    "counts": _asked(lambda v: [(v > 0).sum().item(), torch.count_nonzero(v > 0.1).item()]),
    "of copies": _asked(lambda v: copy.deepcopy(v).abs().mean()),
    "of a masked one": _asked(lambda v: torch.where(v > 0, v, 0.0).sum().item()),
    "of rows": _asked(lambda v: [v.norm(dim=-1).sum(), v.mean(0), v[1:3].sum()]),
    "several at once": lambda training, number: training.log.extend(torch._foreach_norm(list(training.state.values()))),
    "the ratio of an update": _asked(lambda v: (v * 0.9 - v).norm() / v.norm()),
    "averages that are set": _set_averages,
    "averages of many": _foreach_averages,
    "averages that are kept": _kept_averages,
    "averages by out": _averages_out,
    "averages by out, in parts": _averages_out_of_parts,
    "averages that are swapped in": _swapped_averages,
    "targets of the state": _targets(lambda v: v),
    "targets of a copy on the host": _targets(lambda v: v.detach().clone().cpu()),
    "targets of a cast": _targets(lambda v: v.float()),
    "the mean of all steps": _sums,
    "whole tensors": _into_whole_tensors,
    "a history of gradients": _history_of_gradients,
}


def _trained(rank: int, wrap: Callable[[nn.Module], Any], loop: Loop) -> Any:
    training = Training(rank, wrap)
    for number in range(STEPS):
        training.step(number)
        loop(training, number)
    return training.ends()


LOOPS_BY_DEFAULT = (
    *("sums of a cast", "spreads", "extremes", "of rows", "several at once", "averages of many", "whole tensors"),
    *("averages by out, in parts", "averages that are swapped in", "a history of gradients"),
)


def _beside_ddp(rank: int, world_size: int, names: Iterable[str]) -> dict[str, str]:
    wrap, wrong = compiled_once(strategy="alltoall"), {}
    for name in names:
        if how := differs(_trained(rank, wrap, LOOPS[name]), _trained(rank, DistributedDataParallel, LOOPS[name])):
            wrong[name] = how
    return wrong


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        pytest.param(LOOPS_BY_DEFAULT, 2, id="2, some"),
        *(pytest.param((*LOOPS,), ranks, id=f"{ranks}, all", marks=pytest.mark.long) for ranks in (2, 3)),
    ],
)
def test_values_of_state_dicts_are_used_as_under_ddp(names: tuple[str, ...], ranks: int) -> None:
    for wrong in run_ranks(ranks, _beside_ddp, names):
        assert not wrong


@torch.no_grad()
def _average_of_one_rank(training: Training) -> None:
    for name, average in training.copied.state_dict().items():
        average *= 0.9
        average += 0.1 * training.state[name].detach()


ALONE: Mapping[str, Callable[[Training], Any]] = {
    "a norm": lambda training: training.state[TABLE].norm(),
    "a moment's mean": lambda training: training.moments["0 exp_avg"].mean(),
    "a parameter's maximum": lambda training: training.model.module.emb.weight.max(),
    "a gradient's norm": lambda training: training.model.module.emb.weight.grad.norm(),
    "clipping": lambda training: nn.utils.clip_grad_norm_(training.model.parameters(), 1.0),
    "a whole table": lambda training: training.state[TABLE].full_tensor(),
    "all of them": lambda training: embrace_fx.full_state_dict(training.model),
    "a file": lambda training: embrace_fx.save_full_state_dict(training.model, "/tmp/never.pt"),
    "an average in whole tensors": _average_of_one_rank,
    "a norm in a text": lambda training: f"{training.model.module.emb.weight.norm():.4f}",
    "a histogram": lambda training: torch.histc(training.state[TABLE], 8, -1, 1),
    "an array": lambda training: training.state[TABLE].detach().cpu().numpy(),
    "one element": lambda training: training.model.module.emb.weight[3, 2].item(),
    "rows like each other": lambda training: torch.dot(*training.state[TABLE][3:5].unbind()).item(),
    "all weights in a vector": lambda training: nn.utils.parameters_to_vector(training.model.parameters()).std(),
    "a share of zeros": lambda training: (training.moments["0 exp_avg"] == 0).double().mean(),
    # These need no communication.
    "a copy": lambda training: training.state[TABLE].clone(),
    "a copy of all": lambda training: copy.deepcopy(training.state),
    "the half of it": lambda training: training.state[TABLE] * 0.5,
    "a write": lambda training: training.model.module.emb.weight.data.mul_(0.9),
    "a write to a moment": lambda training: training.moments["0 exp_avg"].zero_(),
    "a write to a gradient": lambda training: training.model.module.emb.weight.grad.mul_(0.5),
}
HARMLESS: Mapping[str, Callable[[Training], Any]] = {
    "a print": lambda training: str(training.state[TABLE]),
    "sizes": lambda training: [value.numel() * value.element_size() for value in training.state.values()],
    "a view": lambda training: training.state[TABLE].detach()[3:5].t(),
    "the optimizer's state": lambda training: training.optimizer.state_dict(),
}


def _one_alone(rank: int, world_size: int, names: tuple[str, ...]) -> dict[str, str]:
    """Returns the errors of calls that rank 0 makes alone. Training continues after each error."""
    training = Training(rank, lambda model: embrace_fx.compile(model, strategy="alltoall"))
    errors = {}
    training.step(0)
    for number, name in enumerate(names):
        training.model(*batch_of(2 * number, rank)).backward()
        began_s = time.monotonic()
        try:
            if rank == 0:
                {**ALONE, **HARMLESS}[name](training)
            training.model(*batch_of(2 * number + 1, rank)).backward()
        except PeerFailure as error:
            errors[name] = str(error)
        assert time.monotonic() - began_s < 30.0
        training.optimizer.step()
        training.optimizer.zero_grad()
    return errors


ALONE_BY_DEFAULT = (
    *("a moment's mean", "clipping", "a whole table", "an average in whole tensors", "an array", "one element"),
    *("a copy of all", "a write", "a write to a gradient"),
)


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        pytest.param(ALONE_BY_DEFAULT, 2, id="2, some"),
        *(pytest.param((*ALONE,), ranks, id=f"{ranks}, all", marks=pytest.mark.long) for ranks in (2, 3)),
    ],
)
def test_what_one_rank_alone_does_with_tables_is_refused_on_all_at_once(names: tuple[str, ...], ranks: int) -> None:
    first, *others = run_ranks(ranks, _one_alone, (*names, *HARMLESS))
    assert all(each == first for each in others)
    assert set(first) == set(names)
    for told in first.values():
        assert told.startswith("rank 0: ")
        assert "full_state_dict() on every rank" in told


def _asks_before_a_barrier(rank: int, world_size: int) -> str:
    training = Training(rank, lambda model: embrace_fx.compile(model, strategy="alltoall"))
    training.step(0)
    told = ""
    if rank == 0:
        with pytest.raises(PeerFailure) as refused:
            training.state[TABLE].norm()
        told = str(refused.value)
    dist.barrier()
    training.step(1)
    return told


def test_a_question_is_refused_while_the_others_wait_in_a_barrier() -> None:
    told, _ = run_ranks(2, _asks_before_a_barrier)
    assert "only this rank reads a sharded table: norm of the sharded emb.weight, at test_state_in_use.py" in told
    assert "rank 1: another rank calls the model" in told


OPTIONS: Mapping[str, StateDictOptions] = {
    "whole": StateDictOptions(full_state_dict=True),
    "whole on one rank": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "of one rank": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    "on the host": StateDictOptions(cpu_offload=True),
    "as it is": StateDictOptions(),
}


def _checkpoints(rank: int, world_size: int, strategy: Any, path: Path) -> list[str]:
    training = Training(rank, lambda model: embrace_fx.compile(model, strategy=strategy))
    training.step(0)
    model = training.model.module
    before, wrong = copy.deepcopy(embrace_fx.full_state_dict(model)), []

    def differ() -> bool:
        found = embrace_fx.full_state_dict(model)
        return any(not torch.equal(found[name], value) for name, value in before.items())

    for name, options in OPTIONS.items():
        found = copy.deepcopy(get_model_state_dict(model, options=options))
        if found and isinstance(found[TABLE], TableShard) == options.full_state_dict:
            wrong.append(f"{name}: {type(found[TABLE])}")
        if name != "whole on one rank":
            training.step(1)
            assert differ()
            set_model_state_dict(model, found, options=options)
        if differ():
            wrong.append(name)
    for name, write in {"saved": save, "saved meanwhile": async_save}.items():
        written: Any = write({"model": model.state_dict()}, checkpoint_id=path / name)
        training.step(1)
        if name == "saved meanwhile":
            written.result()
        found = {"model": model.state_dict()}
        load(found, checkpoint_id=path / name)
        model.load_state_dict(found["model"])
        if differ():
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(
    "strategy", [pytest.param("alltoall", marks=pytest.mark.long), pytest.param({TABLE: Grid(2, 1)}, id="a grid")]
)
def test_checkpoints_of_torch_take_and_give_parts(strategy: Any, tmp_path: Path) -> None:
    for wrong in run_ranks(2, _checkpoints, strategy, tmp_path):
        assert not wrong


def _writes_into_a_copy(rank: int, world_size: int) -> str:
    training = Training(rank, lambda model: embrace_fx.compile(model, strategy={TABLE: Grid(2, 1)}))
    training.step(0)
    table = training.state[TABLE]
    with pytest.raises(RuntimeError) as refused:
        table[3:5].mul_(0.5)
    training.model.module.load_state_dict({**training.state, TABLE: table.clone().mul_(0.5)})
    assert torch.equal(training.state[TABLE].full_tensor(), 0.5 * table.full_tensor())
    return str(refused.value)


def test_a_write_that_would_be_lost_is_refused() -> None:
    for told in run_ranks(2, _writes_into_a_copy):
        assert told.startswith("state_dict() returns a copy of a table that is sharded by a Grid")
