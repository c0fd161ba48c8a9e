"""What tests ask of the inside of a compiled model: the one place that names the private parts of a session."""

from __future__ import annotations

from typing import Any


def session_of(model: Any) -> Any:
    """The session of a compiled model."""
    return model._session


def captures_of(model: Any) -> int:
    """How many captures a compiled model has made."""
    return session_of(model).programs.cache.captures


def pipeline_of(model: Any) -> Any:
    """The plan of a compiled model, and what its steps run on."""
    return session_of(model).programs.pipeline


def entries_of(session: Any) -> list[Any]:
    """The captured calls of a session, with their programs."""
    return list(session.programs.cache.entries())


def captured_graph_of(planned: Any) -> Any:
    """The captured graph behind `embrace_fx.plan`."""
    return planned._graph


def memory_limit_of(model: Any) -> Any:
    """The bytes that a compiled model's step may hold, or None."""
    return pipeline_of(model)._shown_step.graph.memory_limit


def graphs_in_order(model: Any, units: tuple[str, ...]) -> list[Any]:
    """The graphs of a model's training programs, after their backwards were put in this order of units."""
    pipeline_of(model)._compute_in_order(units)
    return [of_steps.steady.graph for of_steps in pipeline_of(model)._steps_of.values()]
