"""What becomes of a body on each side: it passes, is refused in one line, fails, or hangs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tests.conformance.bodies import WORLD_SIZE, Side, run_body
from tests.support import ranks
from tests.support.ranks import Outcome, Pool, RankDied, RankTimeout

LIMIT_S = 60.0
"""Of one body on one side. DDP takes a few seconds for its longest one."""

Verdict = Literal["passes", "refused", "fails", "hangs", "skipped"]


@dataclass(frozen=True)
class Result:
    """What became of a body.

    Attributes:
        line: the first line of the message that speaks for it; "" where it passes.
        elapsed_s: of the slowest rank.
    """

    verdict: Verdict
    line: str = ""
    elapsed_s: float = 0.0


class Bench:
    """Ranks that run one body after another. Ranks whose body failed are replaced by new ones."""

    def __init__(self) -> None:
        ranks.PRELOAD.append("tests.conformance.bodies")
        self._pool = Pool()

    def run(self, name: str, side: Side) -> Result:
        outcomes = self._pool.call(WORLD_SIZE, run_body, (name, side), LIMIT_S)
        if any(outcome.exception is not None for outcome in outcomes):
            self._pool.close()
        return result_of(outcomes)

    def close(self) -> None:
        self._pool.close(ranks.EXIT_S)


def result_of(outcomes: list[Outcome[str]]) -> Result:
    """The verdict of all ranks: refused is what every rank that raised refuses in a line of ours."""
    elapsed_s = max(outcome.elapsed_s for outcome in outcomes)
    raised = [outcome.exception for outcome in outcomes if outcome.exception is not None]
    if not raised:
        skipped = next((o.result for o in outcomes if o.result), "")
        return Result("skipped" if skipped else "passes", skipped, elapsed_s)
    if hanging := [each for each in raised if isinstance(each, RankTimeout) or is_timeout(each)]:
        return Result("hangs", first_line(hanging[0]), elapsed_s)
    refusing = [each for each in raised if is_refusal(each)]
    if len(raised) == WORLD_SIZE and len(refusing) == WORLD_SIZE:
        return Result("refused", first_line(refusing[0]), elapsed_s)
    unclear = next((each for each in raised if not isinstance(each, RankDied) and not is_refusal(each)), raised[0])
    return Result("fails", f"{type(unclear).__name__}: {first_line(unclear)}", elapsed_s)


def is_timeout(error: BaseException) -> bool:
    """Returns whether an error says that a collective timed out."""
    return bool(re.search(r"[Tt]imed out|Timeout", str(error)))


def is_refusal(error: BaseException) -> bool:
    """Whether an error is one of ours: what was expected, where, what was found; or an option that there is not."""
    told = re.search(r"expected .*\bfound\b|unexpected keyword", str(error), re.DOTALL | re.IGNORECASE)
    return told is not None and not isinstance(error, AssertionError)


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
