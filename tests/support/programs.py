"""Loops that need another program while gradients and updates of the last step are on their way, beside DDP.

A length, a structure, an evaluation, a plan or a route is new, in all orders. Both ranks draw the same orders, and fail
at the same one: what is found is compared over the ranks before any fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import embrace_fx
from embrace_fx.vocabulary.schedule import SCHEDULES
from tests.support.parts import differs, whole_of

ROWS, WIDTH, TASKS = 24, 6, ("a", "b", "c")
UNCAPTURED = "uncaptured"
"""A task of which no graph holds the forward."""
ZEROED = ("at the head", "between", "at the end", "never")
HOW = ("to none", "in place", "by module")
NAMES = ("emb.weight", "mid.bias", "tables.a.weight")
KINDS: tuple[Callable[[Any], Optimizer], ...] = (
    lambda p: AdamW(p, 0.02, eps=1e-3, weight_decay=0.1),
    lambda p: Adagrad(p, 0.1),
    lambda p: SGD(p, 0.3, momentum=0.5),
)


class Tasks(nn.Module):
    """A trunk and, for each task, a table and a layer that other tasks do not read. `aux` is used only in training."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mid, self.gate = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 8), nn.Linear(2, 8)
        self.tables = nn.ModuleDict({task: nn.Embedding(ROWS, 8) for task in (*TASKS, UNCAPTURED)})
        self.heads = nn.ModuleDict({task: nn.Linear(8, 3) for task in (*TASKS, UNCAPTURED)})
        self.aux = nn.Linear(8, 3)

    def forward(self, ids_BL: Tensor, tags_B: Tensor, task: str, extra_B2: Tensor | None = None) -> Tensor:
        x_BD = torch.tanh(self.mid(self.emb(ids_BL).mean(1)))
        if extra_B2 is not None:
            x_BD = x_BD + self.gate(extra_B2)
        if task == UNCAPTURED and x_BD.sum().item() > 0:
            x_BD = x_BD * 0.5
        loss = F.cross_entropy(self.heads[task](x_BD + self.tables[task](ids_BL).mean(1)), tags_B)
        return loss + F.cross_entropy(self.aux(x_BD), tags_B) if self.training else loss


class Side:
    """A model and its optimizer.

    Attributes:
        kept: gradients of steps before, by the name of their parameter.
    """

    def __init__(self, model: Any, kind: int) -> None:
        self.model, self.plain = model, model.module
        self.optimizer = KINDS[kind](model.parameters())
        self.step, self.handles = 0, list[Any]()
        self.kept: dict[str, Tensor | None] = {}

    @property
    def session(self) -> Any:
        """The session of a compiled model, or None under DDP."""
        return getattr(self.model, "_session", None)

    def find(self, what: str, name: str) -> Tensor | None:
        """Returns a parameter, its gradient, or a gradient that was kept."""
        parameter = self.plain.get_parameter(name)
        if what == "parameter":
            return parameter.detach()
        return parameter.grad if what == "gradient" else self.kept.get(name)

    def forward(self, task: str, length: int = 3, extra: bool = False) -> Any:
        """Calls the model on the next batch."""
        draw = torch.Generator().manual_seed(10 * self.step + dist.get_rank())
        self.step += 1
        ids, tags = torch.randint(ROWS, (4, length), generator=draw), torch.randint(3, (4,), generator=draw)
        more = {"extra_B2": torch.rand(4, 2, generator=draw, dtype=torch.float64)} if extra else {}
        return self.model(ids, tags, task, **more)

    def zero(self, how: str = "to none") -> None:
        if how == "by module":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=how == "to none")

    def train(self, *call: Any, zeroed: str = "between", how: str = "to none") -> Any:
        """Takes a step, and returns its loss."""
        if zeroed == "at the head":
            self.zero(how)
        loss = self.forward(*call)
        if zeroed == "between":
            self.zero(how)
        loss.backward()
        self.optimizer.step()
        if zeroed == "at the end":
            self.zero(how)
        return loss.detach()

    def evaluate(self, task: str, length: int = 3, *, inference: bool = True) -> Any:
        self.model.eval()
        with torch.inference_mode() if inference else torch.no_grad():
            loss = self.forward(task, length)
        self.model.train()
        return loss.item()

    def change(self, what: str, of: str) -> None:
        """Applies a change that a loop, or a new plan, makes between two steps."""
        if what == "hook":
            self.handles.append(self.plain.mid.register_forward_hook(lambda module, given, found: found * 0.9))
        elif what == "hook of a gradient" and self.plain.tables[of].weight.requires_grad:
            self.handles.append(self.plain.tables[of].weight.register_hook(lambda gradient: gradient * 0.5))
        elif what == "unhook" and self.handles:
            self.handles.pop().remove()
        elif what == "freeze":
            for module in (self.plain.tables[of], self.plain.mid):
                module.requires_grad_(not module.weight.requires_grad)
        elif what == "clear":
            self.zero()
        elif what == "step":
            self.optimizer.step()
        elif what == "rate":
            self.optimizer.param_groups[0]["lr"] *= 0.7
        elif what == "whole":
            with self.model.whole() if self.session else contextlib.nullcontext():
                assert self.plain.emb.weight.shape == (ROWS, WIDTH)
        elif what == "plan" and self.session:
            self.session.programs.counters.replan_for = "a test"

    def ends(self) -> Any:
        """Returns the parameters and the optimizer state at the end. Collective."""
        state = [dict(self.optimizer.state[p]) for p in self.model.parameters() if p in self.optimizer.state]
        return whole_of([{name: each.detach() for name, each in self.model.named_parameters()}, state])


def sides_of(kind: int = 0, **options: Any) -> tuple[Side, Side]:
    """Makes a model twice: compiled, and under DDP."""
    torch.manual_seed(0)
    ours: Any = embrace_fx.compile(Tasks().double(), **options)
    torch.manual_seed(0)
    return Side(ours, kind), Side(DistributedDataParallel(Tasks().double(), find_unused_parameters=True), kind)


CALLS: dict[str, Any] = {
    "task": st.sampled_from((*TASKS, *TASKS, UNCAPTURED)),
    "length": st.integers(2, 4),
    "extra": st.booleans(),
}
ORDERS: dict[str, Any] = {"zeroed": st.sampled_from(("between", *ZEROED)), "how": st.sampled_from(HOW)}
CHANGES = ("clear", "step", "hook", "hook of a gradient", "unhook", "freeze", "rate", "whole", "plan")
STARTS: dict[str, Any] = {
    "schedule": st.sampled_from(SCHEDULES),
    "route": st.sampled_from((None, None, "eager")),
    "strategy": st.sampled_from(("alltoall", "alltoall", "auto")),
    "kind": st.integers(0, len(KINDS) - 1),
}


class Changes(RuleBasedStateMachine):
    """Applies each rule to a compiled model and to a DDP model."""

    sides: tuple[Side, ...] = ()

    def both(self, deed: Callable[[Side], Any]) -> None:
        """Does the same on both sides, and compares what they answer."""
        answers, raised = [], None
        for side in self.sides:
            try:
                answers.append(whole_of(deed(side)))
            except Exception as error:
                raised = error
                break
        apart = f"{raised!r}" if raised is not None else differs(*answers)
        wrong = torch.tensor(float(apart != ""))
        dist.all_reduce(wrong)
        if wrong:
            raise AssertionError(f"{apart} on rank {dist.get_rank()}") from raised

    @initialize(**STARTS)
    def begin(self, kind: int, **options: Any) -> None:
        self.sides = sides_of(kind, **options)

    def teardown(self) -> None:
        if self.sides:
            self.both(Side.ends)
            self.sides[0].model.close()

    @rule(apart=st.booleans(), calls=st.lists(st.tuples(*CALLS.values()), min_size=1, max_size=3), **ORDERS)
    def train(self, apart: bool, calls: list[tuple[str, int, bool]], zeroed: str, how: str) -> None:
        """Takes steps with nothing between them that would wait for the last one's updates."""
        rank = dist.get_rank()
        for task, length, extra in calls:
            call = task, length, extra
            if apart and task in TASKS:
                call = TASKS[(TASKS.index(task) + rank) % len(TASKS)], length + rank, extra is (rank == 0)
            self.both(lambda side, call=call: side.train(*call, zeroed=zeroed, how=how))  # type: ignore[misc]

    @rule(first=st.integers(2, 4), synchronised=st.booleans(), **CALLS)
    def accumulate(self, first: int, synchronised: bool, task: str, length: int, extra: bool) -> None:
        def accumulated(side: Side) -> Any:
            with contextlib.nullcontext() if synchronised else side.model.no_sync():
                loss = side.forward(task, first, extra)
                loss.backward()
            other = side.forward(task, length, extra)
            other.backward()
            return loss.detach(), other.detach()

        self.both(accumulated)

    @rule(task=st.sampled_from(TASKS), length=st.integers(2, 4), inference=st.booleans())
    def evaluate(self, task: str, length: int, inference: bool) -> None:
        self.both(lambda side: side.evaluate(task, length, inference=inference))

    @rule(what=st.sampled_from(CHANGES), of=st.sampled_from(TASKS))
    def change(self, what: str, of: str) -> None:
        self.both(lambda side: side.change(what, of))

    @rule(name=st.sampled_from(NAMES), looks=st.booleans())
    def keep(self, name: str, looks: bool) -> None:
        if looks:
            self.both(lambda side: side.kept)
        for side in self.sides:
            side.kept[name] = side.plain.get_parameter(name).grad

    @rule(
        name=st.sampled_from(NAMES),
        of=st.sampled_from(("gradient", "kept gradient", "parameter")),
        how=st.sampled_from(("all", "a row", "a view", "data")),
    )
    def write(self, name: str, of: str, how: str) -> None:
        self.both(lambda side: _write(side.find(of, name), how))

    @rule(name=st.sampled_from(NAMES), what=st.sampled_from(("kept", "a copy", "another", "none", "twice")))
    def put(self, name: str, what: str) -> None:
        made: dict[str, Callable[[Tensor | None, Tensor], Tensor | None]] = {
            "kept": lambda kept, gradient: kept,
            "a copy": lambda kept, gradient: gradient.clone(),
            "another": lambda kept, gradient: torch.full(gradient.shape, 0.1, dtype=gradient.dtype),
            "none": lambda kept, gradient: None,
            "twice": lambda kept, gradient: gradient * 2,
        }
        for side in self.sides:
            parameter = side.plain.get_parameter(name)
            if parameter.grad is not None:
                parameter.grad = made[what](side.kept.get(name), parameter.grad)


def _write(tensor: Tensor | None, how: str) -> None:
    with torch.no_grad():
        if tensor is None:
            return
        if how == "all":
            tensor.mul_(0.5)
        elif how == "a row":
            tensor[1] = 0.25
        elif how == "a view":
            tensor[:2].add_(0.125)
        else:
            tensor.data.view(-1).clamp_(-0.01, 0.01)


def run_changes(rank: int, world_size: int, examples: int, steps: int, number: int = 0) -> None:
    """Runs random loops, the same on all ranks; with a number, those of this seed."""
    options = settings(
        max_examples=examples,
        phases=(Phase.generate,),  # no shrinking, because it takes minutes
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(number)(Changes) if number else Changes, settings=options)
