"""The reference of every exactness claim: one process, the eager model, torch's own optimizers, all ranks' batches.

One step
    1. every rank's loss runs backward by itself; the gradients are added in rank order and divided by their number
    2. the optimizers step: `torch.optim` as it is
       - a table of SparseAdam is given a sparse gradient that holds exactly the touched rows
       - a lazy table takes the dense step, then its untouched rows, and their rows of the optimizer's state, are put
         back: rows without gradient stand still, and the step counter is the optimizer's one
    3. the schedulers step

A row is *touched* in a step when a lookup of any rank reads it, the padding row excepted. A table that anything but a
lookup reads (tied softmax) is touched in all rows. It is observed on the running model, below autograd, and shares
nothing with the compiler's own analysis.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

NO_READ = (aten.detach.default, aten.embedding_renorm_.default)
"""Operations that hand a table on without a gradient: the two of max_norm, which shortens the rows a lookup reads."""

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}

Batch = Tensor | tuple[Any, ...] | dict[str, Any]


def train_reference(
    make_model: Callable[[], nn.Module],
    make_optimizers: Callable[[nn.Module], Sequence[Optimizer]],
    batches_by_rank: Sequence[Sequence[Batch]],
    steps: int,
    row_updates: Literal["exact", "lazy"] = "exact",
    lazy_tables: Collection[str] = (),
    make_schedulers: Callable[[Sequence[Optimizer]], Sequence[LRScheduler]] = lambda optimizers: (),
) -> dict[str, Tensor]:
    """Trains in a single process what N ranks train together.

    Args:
        make_model: makes the model; its forward returns the scalar loss.
        make_optimizers: makes one or several optimizers over the model's parameters.
        batches_by_rank: `[rank][step]`, a tensor, a tuple or a dict as the model's call takes it.
        steps: number of steps.
        row_updates: with "lazy" the untouched rows of `lazy_tables` stand still.
        lazy_tables: names of parameters; has no effect on "exact".
        make_schedulers: makes the learning rate schedulers, which step after the optimizers.

    Returns: parameter name -> value after the last step (a tied parameter once, by its first name).
    """
    model = make_model()
    parameters = dict(model.named_parameters())
    optimizers = make_optimizers(model)
    schedulers = make_schedulers(optimizers)
    lazy = [parameters[name] for name in lazy_tables] if row_updates == "lazy" else []
    for step in range(steps):
        touched = _mean_gradients(model, [batches[step] for batches in batches_by_rank])
        for optimizer in optimizers:
            _step(optimizer, touched, lazy)
        for scheduler in schedulers:
            scheduler.step()
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Fails unless both hold the same parameters with equal values.

    Tolerance, relative to the largest magnitude of the expected parameter: 1e-9 in float64, 1e-5 in float32. The
    message lists every parameter that differs.
    """
    __tracebackhide__ = True
    assert list(actual) == list(expected), f"expected the parameters {list(expected)}, found {list(actual)}"
    failures = []
    for name, value in expected.items():
        found = actual[name].detach()
        assert found.shape == value.shape, f"{name}: expected shape {tuple(value.shape)}, found {tuple(found.shape)}"
        assert found.dtype == value.dtype == dtype, f"{name}: expected {dtype}, found {found.dtype}"
        difference = (found - value).abs()
        allowed = TOLERANCES[dtype] * float(value.abs().max())
        wrong = ~(difference <= allowed)  # not `difference > allowed`, which is False for NaN
        if bool(wrong.any()):
            share, where = float(wrong.double().mean()), wrong.nonzero()[:3].tolist()
            worst = float(difference.max())
            failures.append(
                f"{name}: differs by {worst:.3g}, allowed {allowed:.3g}; {share:.0%} of it, first at {where}"
            )
    assert not failures, "\n".join(failures)


class TouchedRows(TorchDispatchMode):
    """Records which rows of each parameter the operations under it read.

    Attributes:
        rows: parameter -> bool (V,), for the parameters that some operation has read.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: dict[Tensor, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == aten.embedding.default:
            self._lookup(args[0], args[1], padding_idx=args[2] if len(args) > 2 else -1)
        elif func == aten._embedding_bag.default:
            self._lookup(args[0], args[1], padding_idx=args[8] if len(args) > 8 else -1)
        elif func not in NO_READ:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, nn.Parameter) and value.dim():
                    self._touched(value).fill_(True)
        return func(*args, **(kwargs or {}))

    def _lookup(self, table: Tensor, ids: Tensor, padding_idx: int) -> None:
        real = ids[ids != padding_idx]  # one-dimensional; `padding_idx` -1 matches no id
        self._touched(table)[real] = True

    def _touched(self, parameter: Tensor) -> Tensor:
        return self.rows.setdefault(parameter, torch.zeros(len(parameter), dtype=torch.bool))


def _mean_gradients(model: nn.Module, batches: Sequence[Batch]) -> dict[Tensor, Tensor]:
    """Leaves the mean of the batches' gradients in `.grad`; returns the touched rows by parameter."""
    model.zero_grad()
    touched = TouchedRows()
    for batch in batches:
        with touched:
            loss = _call(model, batch)
        loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= len(batches)
    return touched.rows


def _call(model: nn.Module, batch: Batch) -> Tensor:
    if isinstance(batch, dict):
        loss = model(**batch)
    elif isinstance(batch, tuple):
        loss = model(*batch)
    else:
        loss = model(batch)
    assert isinstance(loss, Tensor), f"expected a model whose forward returns its loss, found {type(loss).__name__}"
    return loss


def _step(optimizer: Optimizer, touched: Mapping[Tensor, Tensor], lazy: Collection[Tensor]) -> None:
    updated = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if isinstance(optimizer, SparseAdam):
        for parameter in updated:
            parameter.grad = _only_rows(parameter.grad, touched[parameter])
    standing = [(p, ~touched[p]) for p in updated if any(p is table for table in lazy)]
    before = [(p.detach().clone(), _row_states(optimizer, p)) for p, _ in standing]
    optimizer.step()
    with torch.no_grad():
        for (parameter, still), (value, states) in zip(standing, before, strict=True):
            parameter[still] = value[still]
            for key, state in _row_states(optimizer, parameter).items():
                # State that this step has created was zero before.
                optimizer.state[parameter][key][still] = states.get(key, torch.zeros_like(state))[still]


def _only_rows(gradient: Tensor, touched: Tensor) -> Tensor:
    """The sparse COO tensor that holds the touched rows of a dense gradient, zero ones among them."""
    ids = touched.nonzero().flatten()
    return torch.sparse_coo_tensor(ids.unsqueeze(0), gradient[ids], gradient.shape, is_coalesced=True)


def _row_states(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Copies of the optimizer's state tensors that have a row for each row of the parameter."""
    states = optimizer.state.get(parameter, {})
    return {
        key: value.clone()
        for key, value in states.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    }
