"""What loops make of a model between steps to serve it: scripts, exports, files, copies, other processes."""

from __future__ import annotations

import contextlib
import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import embrace_fx
from tests.support.scenario import Training
from tests.support.scenarios.schemes import DIM, NUM_IDS, ids_of, scheme, stepped


class Served(nn.Module):
    """A model that TorchScript can compile."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.out = nn.Embedding(NUM_IDS, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.norm(torch.tanh(self.words(ids)))).squeeze(-1)


Serve = Callable[[Any, Tensor], Tensor]
"""(the plain model, whole, in eval mode; ids) -> scores."""


def _from_file(made: Any, load: Callable[[Any], Any]) -> Any:
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    return load(file)


def _scripted(plain: Any, ids: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(plain), file)
    file.seek(0)
    found: Tensor = torch.jit.load(file)(ids)
    return found


def _traced(plain: Any, ids: Tensor) -> Tensor:
    found: Tensor = torch.jit.trace(plain, (ids,), check_trace=False)(ids)
    return found


def _frozen(plain: Any, ids: Tensor) -> Tensor:
    found: Tensor = torch.jit.freeze(torch.jit.script(plain))(ids)
    return found


def _exported(plain: Any, ids: Tensor) -> Tensor:
    found: Tensor = torch.export.export(plain, (ids,)).module()(ids)
    return found


def _saved(plain: Any, ids: Tensor) -> Tensor:
    found: Tensor = _from_file(plain, lambda file: torch.load(file, weights_only=False))(ids)
    return found


def _pickled(plain: Any, ids: Tensor) -> Tensor:
    found: Tensor = pickle.loads(pickle.dumps(plain))(ids)
    return found


def _quantized(plain: Any, ids: Tensor) -> Tensor:
    """A copy in fewer digits, as it is served."""
    found: Tensor = copy.deepcopy(plain).bfloat16()(ids)
    return found.double()


def _of_arrays(plain: Any, ids: Tensor) -> Tensor:
    """A model of another process, given arrays by their names."""
    file = io.BytesIO()
    np.savez(file, **{name: value.numpy() for name, value in plain.state_dict().items()})
    file.seek(0)
    alone = Served().eval()
    alone.load_state_dict({name: torch.from_numpy(value) for name, value in np.load(file).items()})
    found: Tensor = alone(ids)
    return found


def _called(plain: Any, ids: Tensor, told: Any) -> None:
    with torch.no_grad():
        told.put(plain(ids).tolist())


def _in_a_process(method: str) -> Serve:
    """The model is sent to another process, as evaluators and loaders are given it."""

    def serve(plain: Any, ids: Tensor) -> Tensor:
        context: Any = multiprocessing.get_context(method)
        told = context.Queue()
        child = context.Process(target=_called, args=(plain, ids, told))
        child.start()
        found = told.get(timeout=120)
        child.join()
        return torch.tensor(found)

    return serve


WAYS: dict[str, Serve] = {
    "a_model_served_by_its_script": _scripted,
    "a_model_served_by_its_trace": _traced,
    "a_model_served_by_a_frozen_script": _frozen,
    "a_model_served_by_its_export": _exported,
    "a_model_served_from_its_file": _saved,
    "a_model_served_from_its_pickle": _pickled,
    "a_model_served_in_fewer_digits": _quantized,
    "a_model_served_from_arrays": _of_arrays,
    "a_model_served_by_a_fork": _in_a_process("fork"),
    "a_model_served_by_a_spawned_process": _in_a_process("spawn"),
}


def _enter(name: str, serve: Serve) -> None:
    def run(training: Training) -> None:
        for k, plain, model in stepped(training, 4, Served()):
            if k % 2:
                with model.whole() if training.is_compiled else contextlib.nullcontext(plain) as whole, torch.no_grad():
                    whole.eval()
                    training.note(serve(whole, ids_of(0, 60)))
                    whole.train()

    run.__name__ = name
    scheme(run)


for _name, _serve in WAYS.items():
    _enter(_name, _serve)


@scheme
def a_model_served_by_a_plain_copy(training: Training) -> None:
    """Outside of `whole()`: rank 0 serves what all ranks have put together."""
    alone = Served().eval()
    for _, _, model in stepped(training, 4, Served()):
        state = {n.removeprefix("module."): value for n, value in embrace_fx.full_state_dict(model).items()}
        if training.rank == 0:
            alone.load_state_dict(state)
            training.note(_scripted(alone, ids_of(0, 60)).detach(), _saved(alone, ids_of(0, 61)).detach())
