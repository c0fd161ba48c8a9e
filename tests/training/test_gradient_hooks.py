"""Hooks on the nodes of autograd are refused; those on parameters' gradients are in `tests.support.scenarios`."""

from __future__ import annotations

import torch

import embrace_fx
from tests.support.ranks import run_ranks_expecting_errors
from tests.support.sides import Matching


def _steps_in_backward(rank: int, world_size: int) -> None:
    plain = Matching()
    node = torch.autograd.graph.get_gradient_edge(plain.second.bias).node
    node.register_hook(lambda *_: None)
    embrace_fx.compile(plain)


def test_hooks_of_autograds_nodes_are_refused() -> None:
    errors = run_ranks_expecting_errors(2, _steps_in_backward)
    assert all("has a hook on the autograd node" in str(error) for error in errors)
    assert all("second.bias" in str(error) for error in errors)
