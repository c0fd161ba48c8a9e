"""Pages name no function, attribute or option that does not exist."""

from __future__ import annotations

import ast
import builtins
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from tests.support.rooms import ROOT, modules

PAGES = (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md")

TORCH: tuple[Any, ...] = (
    torch, torch.func, torch.jit, torch.nested, torch._C, Tensor, fx.GraphModule, nn, nn.functional, nn.Module,
    nn.Embedding,
    DistributedDataParallel, builtins, str,
)  # fmt: skip
OF_EXAMPLES = {
    "DDP",
    "DistributedDataParallel",
    "average",
    "copy.deepcopy",
    "gradient_checkpointing_enable",
    "model",
    "plain.generate",
    "rates.get",
    "self",
}
"""Names that the text beside them defines, and functions of other libraries."""
OPTIONS_OF_OTHERS = {
    "batch_size", "create_graph", "device_mesh", "dtype", "find_unused_parameters", "forward_sync_buffers", "fullgraph",
    "inputs", "out", "preserve_rng_state", "sparse", "strict", "tie_word_embeddings",
}  # fmt: skip
"""Options of torch and transformers."""


@cache
def _defined() -> tuple[frozenset[str], frozenset[str]]:
    """Returns the names of the product's functions and classes, and those of their parameters and fields."""
    definitions, parameters = set(), set()
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    definitions.add(name)
                case ast.arg(arg=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    parameters.add(name)
    return frozenset(definitions), frozenset(parameters)


def _quoted(page: Path) -> str:
    """Returns the code within a page's sentences, a piece per line; what stands in blocks is run by other tests."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    return "\n".join(re.findall(r"`([^`\n]+)`", text))


def unknown(code: str) -> list[str]:
    """Lists the attributes of a compiled model, calls and options in some code that nothing defines."""
    definitions, parameters = _defined()
    known = embrace_fx.CompiledModel, DistributedDataParallel, nn.Module
    of_model = {"logger", "module", "reducer", "require_backward_grad_sync"}  # set by DDP's constructor
    attributes = set(re.findall(r"(?<![\w.])model\.(\w+)", code)) - of_model
    found = [f"model.{name}" for name in attributes if not any(hasattr(each, name) for each in known)]
    for name in set(re.findall(r"([A-Za-z_][\w.]*)\(", code)) - OF_EXAMPLES:
        last = name.rpartition(".")[2]
        found += [] if last in definitions or any(hasattr(each, last) for each in TORCH) else [f"{name}()"]
    options = set(re.findall(r"(?<![\w.])([a-z_]\w*)=(?!=)", code))
    return sorted(found + [f"{name}=" for name in options - parameters - OPTIONS_OF_OTHERS])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_pages_name_only_what_exists(page: Path) -> None:
    assert unknown(_quoted(page)) == []


def test_names_that_do_not_exist_are_found() -> None:
    code = "model.rewire() embrace_fx.kompile(model) compile(model, tables_in=)"
    assert unknown(code) == ["embrace_fx.kompile()", "model.rewire", "model.rewire()", "tables_in="]
