"""What tests ask of the inside of a compiled model: the one place that names the private parts of a session."""

from __future__ import annotations

from typing import Any


def session_of(model: Any) -> Any:
    """The session of a compiled model."""
    return model._session


def captures_of(model: Any) -> int:
    """How many captures a compiled model has made."""
    found: int = session_of(model)._captures.count
    return found


def step_builder_of(model: Any) -> Any:
    """What has built the step that a compiled model runs."""
    return session_of(model).planned.builder


def setting_of(session: Any) -> Any:
    """What a session has been told once, or the plan of a model without ranks."""
    return session._setting


def kinds_of(session: Any) -> list[Any]:
    """The kinds of calls that a session has captured."""
    return list(session._kinds.values())


def captured_graph_of(planned: Any) -> Any:
    """The captured graph behind `embrace_fx.plan`."""
    return planned._graph


def memory_limit_of(model: Any) -> Any:
    """The bytes that a compiled model's step may hold, or None."""
    return step_builder_of(model)._shown.graph.memory_limit
