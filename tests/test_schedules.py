"""The four schedules train to the same parameters, in every training loop that a user may write.

Two parts
    *Schedules*: every schedule x number of ranks x optimizer x model equals the single-process reference to 1e-9, and
    on one and two ranks, where no sum has an order, the other schedules in all bits.
    *Loops*: what loops do beside their steps, under "2d" with lookahead. Each is written once and runs on both sides:
    a compiled model, and the plain one with torch's own optimizer, whose gradients are averaged over the same ranks.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, StepLR

import embrace_fx
from embrace_fx import cost
from embrace_fx.exactness import RowUpdates
from embrace_fx.runtime.failure import PeerFailure
from embrace_fx.schedule import SCHEDULES
from tests.models import MODELS, Batch, Workload
from tests.ranks import reset_torch_state, run_ranks
from tests.reference import assert_same
from tests.training import SEED, Trained, Way, expected_parameters, train_compiled, whole

DTYPE = torch.float64
STEPS = 30
TIMEOUT_S = 280.0

pytestmark = pytest.mark.timeout(300)


# -- schedules ---------------------------------------------------------------------------------------------------------


class QuestionAnswering(nn.Module):
    """BERT with the span of the answer as its target; a loss comes out."""

    def __init__(self, num_words: int) -> None:
        super().__init__()
        config = transformers.BertConfig(
            vocab_size=num_words,
            hidden_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.bert = transformers.BertForQuestionAnswering(config)

    def forward(self, ids_BL: Tensor, mask_BL: Tensor, starts_B: Tensor, ends_B: Tensor) -> Tensor:
        answered = self.bert(input_ids=ids_BL, attention_mask=mask_BL, start_positions=starts_B, end_positions=ends_B)
        loss: Tensor = answered.loss
        return loss


@dataclass(frozen=True)
class QuestionAnsweringWorkload:
    """Sentences of which the last words may be padding."""

    num_words: int = 50
    length: int = 8
    vary: bool = False

    def make(self, dtype: torch.dtype, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = QuestionAnswering(self.num_words).to(dtype)
        for parameter in model.parameters():
            # Some biases shift all scores alike: started at zero they would hold rounding alone, and the tolerance,
            # which is relative to the largest value, would be of nothing.
            if not parameter.any():
                nn.init.normal_(parameter, std=0.1)
        return model

    def batches(self, step: int, rank: int, seed: int) -> Batch:
        random = torch.Generator().manual_seed((seed * 100 + step) * 10 + rank)
        ids = torch.randint(1, self.num_words, (3, self.length), generator=random)
        kept = torch.arange(self.length) < torch.randint(3, self.length + 1, (3, 1), generator=random)
        starts, ends = torch.randint(3, (2, 3), generator=random)
        return ids * kept, kept.long(), starts, ends


WORKLOADS: dict[str, Workload] = {
    "lstm": dict(MODELS)["two_table_lm"],
    "transformer": dict(MODELS)["transformer_encoder"],
    "bert": QuestionAnsweringWorkload(),
    "recommender": dict(MODELS)["bag_recommender"],
}
UPDATES: tuple[tuple[str, RowUpdates], ...] = (
    ("sgd", "exact"),
    ("adagrad", "exact"),
    ("sparse_adam", "exact"),
    ("adam", "lazy"),
    ("adam", "exact"),
)


@dataclass(frozen=True)
class Case:
    """What one visit to the ranks trains, under all schedules."""

    model: str
    world_size: int
    optimizer: str
    row_updates: RowUpdates

    def __str__(self) -> str:
        return f"{self.model}-{self.world_size}-{self.optimizer}-{self.row_updates}"


DEFAULT = frozenset(
    {
        Case("lstm", 2, "adam", "lazy"),
        Case("transformer", 3, "adagrad", "exact"),
        Case("recommender", 1, "adam", "exact"),
    }
)
CASES = [
    pytest.param(case, id=str(case), marks=() if case in DEFAULT else pytest.mark.long)
    for case in (Case(model, n, *update) for model, n, update in product(WORKLOADS, (1, 2, 3, 4), UPDATES))
]


def _train_under_all(rank: int, world_size: int, case: Case) -> dict[str, Trained]:
    results: dict[str, Trained] = {}
    for schedule in SCHEDULES:
        reset_torch_state()
        way = Way(schedule=schedule, steps=STEPS)
        results[schedule] = train_compiled(
            rank, world_size, WORKLOADS[case.model], DTYPE, case.optimizer, case.row_updates, way
        )
    return results


@pytest.mark.parametrize("case", CASES)
def test_every_schedule_trains_to_the_parameters_of_the_reference(case: Case) -> None:
    workload = WORKLOADS[case.model]
    expected = expected_parameters(case.world_size, workload, DTYPE, case.optimizer, case.row_updates, STEPS)

    for results in run_ranks(case.world_size, _train_under_all, case, timeout_s=TIMEOUT_S):
        for schedule, result in results.items():
            assert_same(result.parameters, expected, DTYPE)
            sharded = set(result.strategies.values()) == {"alltoall"}
            assert sharded == (case.row_updates == "lazy" or case.optimizer != "adam")
            if case.world_size <= 2:
                for name, value in results["none"].parameters.items():
                    assert torch.equal(result.parameters[name], value), f"{name} under {schedule}"


# -- loops -------------------------------------------------------------------------------------------------------------

NUM_WORDS, NUM_ITEMS, DIM = 30, 20, 6
Words = tuple[Tensor, Tensor, Tensor]


class Matching(nn.Module):
    """Words and an item match, or not: two tables, one of them padded, and a network between them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, DIM, padding_idx=0)
        self.first = nn.Linear(DIM, 8)
        self.second = nn.Linear(8, DIM)
        self.items = nn.Embedding(NUM_ITEMS, DIM)

    def forward(self, words_BL: Tensor, items_B: Tensor, scale: Tensor) -> Tensor:
        x_BD = self.second(torch.tanh(self.first(self.words(words_BL).mean(1))))
        return F.softplus(-(x_BD * self.items(items_B)).sum(-1)).mean() * scale


def _batch(step: int, rank: int, length: int = 3) -> Words:
    random = torch.Generator().manual_seed(10 * step + rank)
    words = torch.randint(NUM_WORDS, (4, length), generator=random)
    return words, torch.randint(NUM_ITEMS, (4,), generator=random), torch.ones((), dtype=DTYPE)


def _batches(rank: int, steps: int = 8, first: int = 0) -> list[Words]:
    return [_batch(step, rank) for step in range(first, first + steps)]


class Side:
    """A model and its optimizer in a loop: the plain ones, and what a loop does differently for the compiled one."""

    is_compiled = False

    def __init__(self, make_optimizer: Callable[[nn.Module], Optimizer]) -> None:
        torch.manual_seed(SEED)
        self.plain: Any = Matching().to(DTYPE)
        self.optimizer: Any = make_optimizer(self.plain)
        self.model: Any = self.plain
        self.log: list[float] = []
        self.scheduler = StepLR(self.optimizer, 1000)  # made before compile, as most are

    def lookahead(self, batches: Iterable[Words]) -> Iterator[Words]:
        return iter(batches)

    def no_sync(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def reduce(self) -> None:
        """What a compiled model's backward has done already: gradients become their mean over ranks."""
        for parameter in self.plain.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    def clip(self, max_norm: float) -> Tensor:
        self.reduce()
        return nn.utils.clip_grad_norm_(self.plain.parameters(), max_norm)

    def step(self) -> None:
        self.reduce()  # of gradients that are equal on all ranks, nothing but themselves
        self.optimizer.step()

    def update(self, batch: Words) -> None:
        """A step as it stands in every tutorial."""
        self.model(*batch).backward()
        self.step()
        self.optimizer.zero_grad()


class CompiledSide(Side):
    is_compiled = True

    def __init__(self, make_optimizer: Callable[[nn.Module], Optimizer]) -> None:
        super().__init__(make_optimizer)
        self.model = embrace_fx.compile(self.plain, optimizer=self.optimizer, strategy="alltoall")

    def lookahead(self, batches: Iterable[Words]) -> Iterator[Words]:
        found: Iterator[Words] = self.model.lookahead(batches)
        return found

    def no_sync(self) -> AbstractContextManager[None]:
        found: AbstractContextManager[None] = self.model.no_sync()
        return found

    def reduce(self) -> None:
        pass

    def clip(self, max_norm: float) -> Tensor:
        found: Tensor = self.model.clip_grad_norm_(max_norm)
        return found


Loop = Callable[[Side, int], None]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__.replace("_", " ")] = function
    return function


# the batches


@loop
def several_epochs(side: Side, rank: int) -> None:
    for epoch in range(3):
        for batch in side.lookahead(_batches(rank, 4, 4 * epoch)):
            side.update(batch)


@loop
def epochs_left_early(side: Side, rank: int) -> None:
    for epoch in range(3):
        for step, batch in enumerate(side.lookahead(_batches(rank, 6, 6 * epoch))):
            side.update(batch)
            if step == 3:
                break


@loop
def no_lookahead(side: Side, rank: int) -> None:
    for batch in _batches(rank, 14):
        side.update(batch)


@loop
def lengths_that_vary(side: Side, rank: int) -> None:
    for batch in side.lookahead([_batch(step, rank, 2 + (step * (rank + 2)) % 5) for step in range(12)]):
        side.update(batch)


@loop
def batches_of_its_own_between(side: Side, rank: int) -> None:
    for step, batch in enumerate(side.lookahead(_batches(rank, 10))):
        side.update(batch)
        if step % 3 == 2:
            side.update(_batch(50 + step, rank))


@loop
def batches_moved(side: Side, rank: int) -> None:
    for batch in side.lookahead(_batches(rank)):
        side.update((batch[0].clone(), *batch[1:]))


@loop
def batches_written(side: Side, rank: int) -> None:
    for step, batch in enumerate(side.lookahead(_batches(rank))):
        if step % 2:
            batch[0][0, 0] = step
        side.update(batch)


WARNED = frozenset({"batches of its own between", "batches moved", "batches written"})
"""Loops whose batches are not those that were looked ahead to: the compiled model says so, once."""


@loop
def evaluations_between(side: Side, rank: int) -> None:
    for step, batch in enumerate(side.lookahead(_batches(rank))):
        side.update(batch)
        side.model.eval()
        with torch.inference_mode() if step % 2 == 0 else torch.no_grad():
            side.log.append(float(side.model(*_batch(40, 0))))
        side.model.train()


@loop
def evaluations_inside(side: Side, rank: int) -> None:
    for batch in side.lookahead(_batches(rank)):
        loss = side.model(*batch)
        with torch.no_grad():
            side.log.append(float(side.model(*_batch(40, 0))))
        loss.backward()
        side.step()
        side.optimizer.zero_grad()


# forwards and backwards


@loop
def two_losses(side: Side, rank: int) -> None:
    batches = side.lookahead(_batches(rank, 12))
    for first in batches:
        (side.model(*first) + 2 * side.model(*next(batches))).backward()
        side.step()
        side.optimizer.zero_grad()


@loop
def two_forwards_first(side: Side, rank: int) -> None:
    batches = side.lookahead(_batches(rank, 12))
    for first in batches:
        losses = [side.model(*first), side.model(*next(batches))]
        losses[0].backward()
        losses[1].backward()
        side.step()
        side.optimizer.zero_grad()


@loop
def backwards_in_other_order(side: Side, rank: int) -> None:
    batches = side.lookahead(_batches(rank, 12))
    for first in batches:
        losses = [side.model(*first), side.model(*next(batches))]
        losses[1].backward()
        losses[0].backward()
        side.step()
        side.optimizer.zero_grad()


@loop
def forwards_without_backward(side: Side, rank: int) -> None:
    for step, batch in enumerate(side.lookahead(_batches(rank, 10))):
        loss = side.model(*batch)
        if step % 3:
            loss.backward()
            side.step()
            side.optimizer.zero_grad()


@loop
def backwards_without_step(side: Side, rank: int) -> None:
    for step, batch in enumerate(side.lookahead(_batches(rank, 10))):
        side.model(*batch).backward()
        if step % 3:
            side.step()
            side.optimizer.zero_grad()


@loop
def steps_without_backward(side: Side, rank: int) -> None:
    for batch in side.lookahead(_batches(rank)):
        side.update(batch)
        side.step()


@loop
def accumulation(side: Side, rank: int) -> None:
    for step, batch in enumerate(side.lookahead(_batches(rank, 12))):
        with side.no_sync() if step % 3 < 2 else contextlib.nullcontext():
            side.model(*batch).backward()
        if step % 3 == 2:
            side.step()
            side.optimizer.zero_grad()


@loop
def closures(side: Side, rank: int) -> None:
    for batch in side.lookahead(_batches(rank)):

        def closure(batch: Words = batch) -> Tensor:
            side.optimizer.zero_grad()
            loss: Tensor = side.model(*batch)
            loss.backward()
            side.reduce()
            return loss

        side.optimizer.step(closure)


# gradients


@loop
def clipping(side: Side, rank: int) -> None:
    for batch in side.lookahead(_batches(rank)):
        side.model(*batch).backward()
        side.log.append(float(side.clip(0.05)))
        side.step()
        side.optimizer.zero_grad()


@loop
def gradients_zeroed_before_the_backward(side: Side, rank: int) -> None:
    for batch in side.lookahead(_batches(rank)):
        loss = side.model(*batch)
        side.optimizer.zero_grad()
        loss.backward()
        side.step()


@loop
def gradients_zeroed_in_place(side: Side, rank: int) -> None:
    for batch in side.lookahead(_batches(rank)):
        side.optimizer.zero_grad(set_to_none=False)
        side.model(*batch).backward()
        side.step()


@loop
def gradients_zeroed_before_the_step(side: Side, rank: int) -> None:
    for step, batch in enumerate(side.lookahead(_batches(rank))):
        side.model(*batch).backward()
        if step % 2:
            side.optimizer.zero_grad()
        side.step()
        side.model.zero_grad()


@loop
def gradients_never_zeroed(side: Side, rank: int) -> None:
    """Of the dense ones: a step takes the rows of sharded tables with it."""
    for batch in side.lookahead(_batches(rank)):
        for table in (side.plain.words, side.plain.items):
            table.weight.grad = None
        side.model(*batch).backward()
        side.step()


@loop
def gradients_looked_at(side: Side, rank: int) -> None:
    for batch in side.lookahead(_batches(rank)):
        side.model(*batch).backward()
        side.reduce()
        gradient = side.plain.first.weight.grad
        side.log += [float(gradient.norm()), gradient[0, 0].item(), float(gradient.data.sum())]
        side.step()
        side.optimizer.zero_grad()


@loop
def gradients_kept(side: Side, rank: int) -> None:
    kept = []
    for batch in side.lookahead(_batches(rank)):
        side.model(*batch).backward()
        side.reduce()
        kept.append(side.plain.first.weight.grad)
        side.step()
        side.optimizer.zero_grad()
        if len(kept) % 3 == 1:
            side.log.append(float(kept[-1].norm()))
    side.log += [float(gradient.norm()) for gradient in kept]


@loop
def gradients_changed(side: Side, rank: int) -> None:
    for batch in side.lookahead(_batches(rank)):
        side.model(*batch).backward()
        side.reduce()
        side.plain.first.weight.grad *= 0.5
        side.plain.first.bias.grad = side.plain.first.bias.grad + 0.01
        side.plain.second.weight.grad = None
        side.step()
        side.optimizer.zero_grad()


@loop
def gradients_of_one_parameter_scaled(side: Side, rank: int) -> None:
    for batch in side.lookahead(_batches(rank)):
        side.model(*batch).backward()
        side.reduce()
        side.plain.first.weight.grad *= 0.5
        side.step()
        side.optimizer.zero_grad()


@loop
def a_penalty_outside_of_the_model(side: Side, rank: int) -> None:
    for batch in side.lookahead(_batches(rank)):
        penalty = sum(p.square().sum() for p in side.model.first.parameters())
        (side.model(*batch) + penalty).backward()
        side.step()
        side.optimizer.zero_grad()


# parameters and state


@loop
def parameters_read(side: Side, rank: int) -> None:
    for batch in side.lookahead(_batches(rank)):
        side.update(batch)
        values = whole(side.model.named_parameters())
        side.log += [float(value.norm()) for value in values.values()]


@loop
def parameters_clamped(side: Side, rank: int) -> None:
    for batch in side.lookahead(_batches(rank)):
        side.update(batch)
        with torch.no_grad():
            for parameter in side.model.parameters():
                parameter.clamp_(-0.3, 0.3)


@loop
def parameters_of_submodules_clamped(side: Side, rank: int) -> None:
    for batch in side.lookahead(_batches(rank)):
        side.update(batch)
        side.model.first.weight.data.clamp_(-0.1, 0.1)


@loop
def modules_clamped_by_a_function(side: Side, rank: int) -> None:
    def clamp(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.clamp_(-0.1, 0.1)

    for batch in side.lookahead(_batches(rank)):
        side.update(batch)
        side.model.apply(clamp)


@loop
def state_written_through_the_state_dict(side: Side, rank: int) -> None:
    for batch in side.lookahead(_batches(rank)):
        side.update(batch)
        with torch.no_grad():
            for value in side.model.state_dict().values():
                value.mul_(0.9)


@loop
def state_of_the_plain_model_read(side: Side, rank: int) -> None:
    for batch in side.lookahead(_batches(rank)):
        side.update(batch)
        side.log += [float(value.norm()) for value in whole(side.plain.state_dict().items()).values()]


@loop
def state_saved_and_loaded(side: Side, rank: int) -> None:
    for step, batch in enumerate(side.lookahead(_batches(rank))):
        if step == 3:
            saved = {name: value.clone() for name, value in side.model.state_dict().items()}
        side.update(batch)
        if step == 5:
            side.model.load_state_dict(saved)


@loop
def state_read_on_one_rank(side: Side, rank: int) -> None:
    for batch in side.lookahead(_batches(rank)):
        side.model(*batch).backward()
        if rank == 0:
            side.model.state_dict()
        dist.barrier()
        side.step()
        side.optimizer.zero_grad()
        if rank == 0:
            side.model.state_dict()
            side.optimizer.state_dict()
        dist.barrier()


@loop
def optimizer_state_read(side: Side, rank: int) -> None:
    for batch in side.lookahead(_batches(rank)):
        side.update(batch)
        of_first = side.optimizer.state_dict()["state"][1]
        side.log += [float(value.sum()) for value in of_first.values() if isinstance(value, Tensor)]


@loop
def schedulers(side: Side, rank: int) -> None:
    side.scheduler.step_size = 2
    made_after = ExponentialLR(side.optimizer, 0.9)
    for batch in side.lookahead(_batches(rank, 12)):
        side.update(batch)
        side.scheduler.step()
        made_after.step()


@loop
def a_gradient_scaler(side: Side, rank: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for batch in side.lookahead(_batches(rank)):
        scaler.scale(side.model(*batch)).backward()
        side.reduce()
        scaler.step(side.optimizer)
        scaler.update()
        side.log.append(scaler.get_scale())
        side.optimizer.zero_grad()


@loop
def learning_rates_written(side: Side, rank: int) -> None:
    for step, batch in enumerate(side.lookahead(_batches(rank))):
        side.update(batch)
        for group in side.optimizer.param_groups:
            group["lr"] = 0.3 / (step + 2)


@loop
def hooks_of_the_optimizer(side: Side, rank: int) -> None:
    side.optimizer.register_step_post_hook(lambda *arguments: side.log.append(1.0))
    for batch in side.lookahead(_batches(rank)):
        side.update(batch)


# failures


@loop
def a_loss_that_is_not_a_number(side: Side, rank: int) -> None:
    batches = _batches(rank, 10)
    for step in (2, 6):
        if rank == 1:
            batches[step][2].fill_(torch.nan)
    for step, batch in enumerate(side.lookahead(batches)):
        if step in {2, 6}:
            if side.is_compiled:
                with pytest.raises(FloatingPointError, match=r"rank\(s\) 1\."):
                    side.model(*batch).backward()
            continue
        side.update(batch)


@loop
def an_id_outside_of_a_table(side: Side, rank: int) -> None:
    batches = _batches(rank, 10)
    for step in (3, 4, 8):
        if rank == step % 2:
            batches[step][0][1, 1] = NUM_WORDS
    for step, batch in enumerate(side.lookahead(batches)):
        if step in {3, 4, 8}:
            if side.is_compiled:
                with pytest.raises(PeerFailure, match=f"rank {step % 2}: expected ids from 0 to 29"):
                    side.model(*batch)
            continue
        side.update(batch)


OPTIMIZERS: Mapping[str, Callable[[nn.Module], Optimizer]] = {
    "adagrad": lambda model: Adagrad(model.parameters(), lr=0.1, eps=1e-3),
    "sgd": lambda model: SGD(model.parameters(), lr=0.3),
}


def _cut_finely() -> None:
    """Buckets and chunks of a few elements: a model this small would be one of each."""
    cost.chunk_bytes = lambda *arguments, **options: 160
    cost.bucket_bytes = lambda *arguments, **options: 400


@contextlib.contextmanager
def _finely_cut() -> Iterator[None]:
    chunk_bytes, bucket_bytes = cost.chunk_bytes, cost.bucket_bytes
    _cut_finely()
    try:
        yield
    finally:
        cost.chunk_bytes, cost.bucket_bytes = chunk_bytes, bucket_bytes


@dataclass(frozen=True)
class Outcome:
    """What a loop has made on one side of one rank."""

    parameters: dict[str, Tensor]
    log: list[float]
    warnings: list[str]


def _run_loop(side: Side, run: Loop, rank: int) -> Outcome:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "Sparse invariant checks")
        run(side, rank)
    return Outcome(whole(side.model.named_parameters()), side.log, [str(each.message) for each in caught])


def _run_both(rank: int, world_size: int, names: list[str], optimizer: str) -> dict[str, tuple[Outcome, Outcome]]:
    found = {}
    with _finely_cut():
        for name in names:
            reset_torch_state()
            try:
                expected = _run_loop(Side(OPTIMIZERS[optimizer]), LOOPS[name], rank)
                found[name] = expected, _run_loop(CompiledSide(OPTIMIZERS[optimizer]), LOOPS[name], rank)
            except BaseException as error:
                error.add_note(f"in the loop: {name}")
                raise
    return found


def _check_loops(world_size: int, names: list[str], optimizer: str) -> None:
    __tracebackhide__ = True
    for by_name in run_ranks(world_size, _run_both, names, optimizer, timeout_s=TIMEOUT_S):
        for name, (expected, found) in by_name.items():
            assert_same(found.parameters, expected.parameters, DTYPE)
            assert found.log == pytest.approx(expected.log, rel=1e-9), name
            assert len(found.warnings) == (name in WARNED), (name, found.warnings)
            assert all("expected the batch that lookahead() yielded" in text for text in found.warnings)


RARE = frozenset(
    {
        "no lookahead",
        "two losses",
        "two forwards first",
        "forwards without backward",
        "evaluations inside",
        "gradients zeroed in place",
        "gradients zeroed before the backward",
        "gradients of one parameter scaled",
        "parameters read",
        "state of the plain model read",
        "modules clamped by a function",
        "optimizer state read",
        "learning rates written",
        "several epochs",
        "batches written",
        "backwards in other order",
        "steps without backward",
        "closures",
        "gradients never zeroed",
        "gradients kept",
        "gradients zeroed before the step",
        "a penalty outside of the model",
        "parameters of submodules clamped",
        "state written through the state dict",
        "hooks of the optimizer",
        "an id outside of a table",
        "epochs left early",
    }
)
"""Loops that another one, or the tests of one part, cover in large part: run with the `long` tests."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name in RARE else ()) for name in LOOPS])
def test_a_loop_trains_as_without_the_compiler(name: str) -> None:
    _check_loops(2, [name], "adagrad")


@pytest.mark.long
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize(("world_size", "optimizer"), [(3, "sgd"), (4, "adagrad")])
def test_a_loop_trains_as_without_the_compiler_on_more_ranks(name: str, world_size: int, optimizer: str) -> None:
    _check_loops(world_size, [name], optimizer)


# -- loops of other models ---------------------------------------------------------------------------------------------


class Generator(nn.Module):
    """From a kind to an example of it."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(20, DIM)
        self.mix = nn.Linear(DIM, DIM)

    def forward(self, kinds_B: Tensor) -> Tensor:
        found: Tensor = self.mix(self.kinds(kinds_B))
        return found


class Critic(nn.Module):
    """How real examples of a kind look."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(20, DIM)
        self.judge = nn.Linear(DIM, 1)

    def forward(self, x_BD: Tensor, kinds_B: Tensor) -> Tensor:
        return F.softplus(self.judge(torch.tanh(x_BD + self.kinds(kinds_B)))).mean()


def _train_against_each_other(rank: int, world_size: int, *, compiled: bool) -> dict[str, Tensor]:
    torch.manual_seed(SEED)
    generator: nn.Module = Generator().to(DTYPE)
    critic: nn.Module = Critic().to(DTYPE)
    plain = generator, critic
    of_generator, of_critic = (Adagrad(model.parameters(), 0.1) for model in plain)
    if compiled:
        generator = embrace_fx.compile(generator, optimizer=of_generator, strategy="alltoall")
        critic = embrace_fx.compile(critic, optimizer=of_critic, strategy="alltoall")

    def step(model: nn.Module, optimizer: Optimizer) -> None:
        if not compiled:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= world_size
        optimizer.step()

    for k in range(6):
        random = torch.Generator().manual_seed(10 * k + rank)
        kinds = torch.randint(20, (5,), generator=random)
        real = torch.randn(5, DIM, generator=random, dtype=DTYPE)
        of_critic.zero_grad()
        (critic(real, kinds) - critic(generator(kinds).detach(), kinds)).backward()
        step(critic, of_critic)
        of_generator.zero_grad()
        critic(generator(kinds), kinds).backward()
        step(generator, of_generator)
    return {
        f"{type(of).__name__} {name}": value
        for of, model in zip(plain, (generator, critic), strict=True)
        for name, value in whole(model.named_parameters()).items()
    }


def _compare_adversaries(rank: int, world_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with _finely_cut():
        return tuple(_train_against_each_other(rank, world_size, compiled=c) for c in (False, True))  # type: ignore[return-value]


def test_two_compiled_models_train_against_each_other() -> None:
    for expected, found in run_ranks(2, _compare_adversaries):
        assert_same(found, expected, DTYPE)


def _step_in_turn(rank: int, world_size: int, *, compiled: bool) -> tuple[dict[str, Tensor], list[float]]:
    """Two optimizers over parameters of one bucket: the first steps every time, the second every other time."""
    torch.manual_seed(SEED)
    plain: Any = Matching().to(DTYPE)
    often = Adagrad(plain.second.parameters(), 0.1)
    seldom = SGD([p for name, p in plain.named_parameters() if not name.startswith("second")], 0.1)
    model = embrace_fx.compile(plain, optimizer=(often, seldom), strategy="alltoall") if compiled else plain
    norms = []
    for step, batch in enumerate(_batches(rank)):
        model(*batch).backward()
        if not compiled:
            for parameter in plain.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
        often.step()
        often.zero_grad()
        norms.append(float(plain.first.weight.grad.norm()))
        if step % 2:
            seldom.step()
            seldom.zero_grad()
    return whole(model.named_parameters()), norms


def _compare_turns(rank: int, world_size: int) -> list[tuple[dict[str, Tensor], list[float]]]:
    return [_step_in_turn(rank, world_size, compiled=compiled) for compiled in (False, True)]


def test_two_optimizers_that_share_a_bucket_step_in_turn() -> None:
    for (expected, expected_norms), (found, norms) in run_ranks(2, _compare_turns):
        assert norms == pytest.approx(expected_norms, rel=1e-9)
        assert_same(found, expected, DTYPE)


# -- what is refused ---------------------------------------------------------------------------------------------------


def _clip_with_torch(side: Side, batch: Words) -> None:
    side.model(*batch).backward()
    nn.utils.clip_grad_norm_(side.model.parameters(), 0.01)


def _clip_the_plain_model(side: Side, batch: Words) -> None:
    side.model(*batch).backward()
    nn.utils.clip_grad_norm_(side.plain.parameters(), 0.01)


def _clip_zeroed_in_place(side: Side, batch: Words) -> None:
    side.update(batch)
    side.optimizer.zero_grad(set_to_none=False)
    _clip_with_torch(side, batch)


def _clip_two_backwards(side: Side, batch: Words) -> None:
    side.model(*batch).backward()
    _clip_with_torch(side, batch)


CLIPPINGS = (_clip_with_torch, _clip_the_plain_model, _clip_zeroed_in_place, _clip_two_backwards)


def _clip(rank: int, world_size: int, clip: Callable[[Side, Words], None]) -> None:
    side = CompiledSide(OPTIMIZERS["adagrad"])
    for batch in _batches(rank, 3):
        side.update(batch)
    clip(side, _batch(3, rank))
    with pytest.raises(RuntimeError, match=r"changed in place \(clipped or unscaled\?\).*clip_grad_norm_"):
        side.step()


@pytest.mark.parametrize("clip", CLIPPINGS, ids=lambda clip: clip.__name__.strip("_").replace("_", " "))
def test_clipping_with_torch_is_refused(clip: Callable[[Side, Words], None]) -> None:
    run_ranks(2, _clip, clip)


def _write_held_parameters(rank: int, world_size: int) -> None:
    side = CompiledSide(OPTIMIZERS["adagrad"])
    held = side.plain.first.weight
    side.update(_batch(0, rank))
    with torch.no_grad():
        held.clamp_(-0.1, 0.1)
    with pytest.raises(RuntimeError, match=r"written only through the compiled model.*call model\.synchronize\(\)"):
        side.update(_batch(1, rank))


def test_a_parameter_held_and_written_before_its_update_is_refused() -> None:
    run_ranks(2, _write_held_parameters)
