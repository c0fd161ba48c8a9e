"""The snippets of docs/from_ddp.md, as they stand there, on 2 ranks; and what they are said to do."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import embrace_fx
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same
from tests.support.sides import DTYPE, Matching, draw_batches

PAGE = Path(__file__).parents[2] / "docs" / "from_ddp.md"


def snippets() -> dict[str, list[str]]:
    """Returns heading -> the Python blocks below that heading."""
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {text.split("\n")[0]: re.findall(r"```python\n(.*?)```", text, re.DOTALL) for text in sections}


def make_model() -> Matching:
    torch.manual_seed(5)
    return Matching().to(DTYPE)


def names(rank: int, path: Path) -> dict[str, Any]:
    """Returns the names that a snippet may use without defining them."""
    modules = {"copy": copy, "dist": dist, "embrace_fx": embrace_fx, "itertools": itertools, "torch": torch}
    loader = draw_batches(rank, 4)
    uneven = draw_batches(rank, 4 + rank)
    return {**modules, "make_model": make_model, "loader": loader, "uneven_loader": uneven, "rank": rank, "path": path}


def execute(snippet: str, known: dict[str, Any]) -> None:
    sharding = snippet.replace("embrace_fx.compile(plain)", 'embrace_fx.compile(plain, strategy="alltoall")')
    exec(compile(sharding, str(PAGE), "exec"), known)


def run_page(rank: int, world_size: int, path: Path, section: str) -> dict[str, Tensor]:
    """Runs the training loop, then the snippets of a section. Returns the weights."""
    known, found = names(rank, path), snippets()
    execute(found["A loop, line by line"][0], known)
    before = known["model"].full_state_dict()
    for snippet in found[section]:
        execute(snippet, known)
    after: dict[str, Tensor] = known["model"].full_state_dict()
    if section == "A checkpoint of one file":
        assert_same(after, before, DTYPE)
    if section == "An average of the weights":
        assert not torch.equal(known["whole"]["words.weight"], after["words.weight"])
        assert type(known["whole"]["words.weight"]) is Tensor
    if section == "Evaluation on one rank" and rank == 0:
        with torch.no_grad():
            assert torch.isfinite(known["found"])
    return after


SECTIONS = (
    "A checkpoint of one file",
    "An average of the weights",
    "Frozen parameters",
    "Ranks with more batches than others",
    "Evaluation on one rank",
)


@pytest.mark.parametrize(
    "section", [SECTIONS[0], *(pytest.param(each, marks=pytest.mark.long) for each in SECTIONS[1:])]
)
def test_snippets_run_as_they_stand(section: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, run_page, tmp_path / "checkpoint", section)
    assert_same(first, second, DTYPE)


def test_every_section_is_tested() -> None:
    with_code = {name for name, blocks in snippets().items() if blocks}
    assert with_code == {"A loop, line by line", *SECTIONS}
