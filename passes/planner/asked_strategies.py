"""Parses the user's `strategy=`: one strategy for all tables, or one per pattern of parameter names."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from embrace_fx.vocabulary.plan import STRATEGIES, Grid

Strategy = str | Grid | Mapping[str, str | Grid]
"""A name of `STRATEGIES`, "auto", or a grid (for "alltoall"); for all tables, or per pattern of parameter names."""


def check_strategy(strategy: Strategy, where: str = "the plan") -> None:
    """Raises `ValueError` if a strategy is neither a known name nor a grid nor a mapping from patterns to these.

    Args:
        where: the call to name in the error message.
    """
    if not isinstance(strategy, str | Grid | Mapping):
        raise ValueError(
            f"{where}: strategy is {strategy!r}. Pass 'auto', a Grid, the name of a strategy "
            f"({', '.join(STRATEGIES)}), or a mapping from patterns of parameter names to strategies, such as "
            "{'embedding.*': 'alltoall'}."
        )
    for pattern, name in _as_patterns(strategy).items():
        if not isinstance(name, Grid) and name not in (*STRATEGIES, "auto"):
            raise ValueError(
                f"{where}: there is no strategy {name!r}, which was passed for {pattern!r}. Pass 'auto', a Grid or one "
                f"of {', '.join(STRATEGIES)}."
            )


def _as_patterns(strategy: Strategy) -> Mapping[str, str | Grid]:
    """Returns a strategy as a mapping from patterns of parameter names to strategies. A strategy that is not a mapping
    gets the pattern "*", which matches all names.
    """
    return {"*": strategy} if isinstance(strategy, str | Grid) else strategy


def requested_strategies(
    strategy: Strategy,
    tables: tuple[str, ...],
    parameters: tuple[str, ...] = (),
    tied: Mapping[str, str] | None = None,
) -> dict[str, str | Grid]:
    """Maps each table or other parameter to the requested strategy or grid, or to "auto" if none was requested.

    A single strategy applies to all tables. A pattern may match any trainable parameter, but a pattern for "alltoall"
    or a grid may match only tables.

    Args:
        tied: other names of tied parameters, such as "lm_head.weight" -> the parameter's first name.

    Raises:
        ValueError: a strategy does not exist, or a pattern matches nothing.
    """
    check_strategy(strategy)
    chosen: dict[str, str | Grid] = dict.fromkeys((*tables, *parameters), "auto")
    for pattern, name in _as_patterns(strategy).items():
        tables_only = not isinstance(strategy, Mapping) or name == "alltoall" or isinstance(name, Grid)
        named = tables if tables_only else tuple(chosen)
        by_others = [name for other, name in (tied or {}).items() if name in named and fnmatch.fnmatch(other, pattern)]
        matched = [*fnmatch.filter(named, pattern), *by_others]
        if isinstance(strategy, Mapping) and not matched:
            raise ValueError(_no_match_error(pattern, tables, parameters, tables_only=tables_only))
        chosen.update(dict.fromkeys(matched, name))
    return chosen


def _no_match_error(pattern: str, tables: tuple[str, ...], parameters: tuple[str, ...], *, tables_only: bool) -> str:
    """Returns the error text for a pattern that matches no name.

    Args:
        tables_only: whether the pattern may match only names of tables.
    """
    what = "table" if tables_only else "table or another trainable parameter"
    names = tables if tables_only else tuple(dict.fromkeys((*tables, *parameters)))
    return (
        f"strategy: the pattern {pattern!r} matches no {what}. There are {', '.join(names) or 'no tables'}. Use a "
        f"{'table' if tables_only else 'parameter'}'s name, or a pattern such as '*.embedding.weight'."
    )
