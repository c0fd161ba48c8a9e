"""Finds a model's tables, and which rows a batch reads, from its modules, without capturing the forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = (nn.Embedding, nn.EmbeddingBag)
"""The classes of lookup layers."""
LEAST_SHARE = 1 / 16
"""A tensor probably contains a table's ids if its largest value is at least this share of the table's number of rows.
"""
_INTEGERS = (torch.int64, torch.int32)


def lookup_tables(model: nn.Module, names: Collection[str], *, only_sparse: bool = False) -> list[str]:
    """Returns the names of the parameters that are weights of embedding layers.

    Args:
        names: the names of the parameters to consider.
        only_sparse: whether to consider only layers with `sparse=True`.
    """
    layers = [each for each in model.modules() if isinstance(each, LAYERS)]
    # Read `_parameters`, because reading the weight of a parametrized layer may change buffers.
    weights = {id(layer._parameters.get("weight")) for layer in layers if layer.sparse or not only_sparse}
    return [name for name, parameter in model.named_parameters() if name in names and id(parameter) in weights]


def possible_tables(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that may be embedding tables, by name. These are the trainable matrices that are used by
    exactly one module, which is an embedding layer or a module not defined by torch.
    """
    named = [(f"{name}.", module) for name, module in model.named_modules() if module._parameters]
    shared = Counter(id(parameter) for _, module in named for parameter in module._parameters.values())
    layers = [
        (f"{prefix}{name}".removeprefix("."), parameter)  # the root's prefix is "."
        for prefix, module in named
        if isinstance(module, LAYERS) or not type(module).__module__.startswith("torch.nn.")
        for name, parameter in module._parameters.items()
    ]
    return {n: p for n, p in layers if p is not None and p.requires_grad and p.dim() == 2 and shared[id(p)] == 1}


def possible_heads(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the weights that may belong to output layers, by name. These are the trainable weights of linear layers
    that have as many rows as an embedding.
    """
    rows = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found = {id(layer.weight): f"{name}.weight" for name, layer in layers if layer.out_features in rows}
    return {name: p for name in found.values() if (p := model.get_parameter(name)).requires_grad}


def has_labels(ids: Sequence[Tensor], head: nn.Parameter) -> bool:
    """Returns whether a batch probably contains both ids and labels. This is assumed if at least two of its tensors
    have a largest value that fits the number of rows of `head`.

    Args:
        ids: the integer tensors of the batch.
        head: the weight of the output layer.
    """
    largest = [int(each.max()) for each in ids]
    return sum(LEAST_SHARE * len(head) <= most < len(head) for most in largest) > 1


def possible_ids(leaves: Sequence[Any]) -> list[Tensor]:
    """Returns the nonempty integer tensors of a batch that are neither sparse nor nested. They may contain ids.

    Args:
        leaves: the flattened arguments of the call.
    """
    integers = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype in _INTEGERS]
    return [each for each in integers if each.layout is torch.strided and not each.is_nested and each.numel()]


def possible_rows(ids: Sequence[Tensor], num_rows: int) -> Tensor:
    """Returns the distinct row ids (K,) of a table that a batch probably reads. Returns all rows if no tensor fits the
    table.

    A tensor fits if all of its values are row ids of the table. A tensor with only small values may contain ids of a
    sorted or a large table, or counts. Such tensors are used only if no others fit.

    Args:
        ids: the integer tensors of the batch.
        num_rows: the number of rows of the table.
    """
    fitting, likely = [], []
    for each in ids:
        least, most = (int(bound) for bound in each.aminmax())
        if least >= 0 and most < num_rows:
            fitting.append(each.reshape(-1).cpu().to(torch.int64))
            likely += fitting[-1:] if LEAST_SHARE * num_rows <= most else []
    found = likely or fitting
    return torch.cat(found).unique() if found else torch.arange(num_rows, device="cpu")
