"""Shows a model's graphs as text, as differences between passes, and as drawings.

graphs["shard_tables"]                          a `torch.fx.GraphModule`
graphs.diff("shard_tables", "reduce_gradients") a pass's changes, as a unified diff
graphs.source("backward")                       what runs, as Python
graphs.save("graphs.svg")                       a drawing of the phases of a step; `.dot` for Graphviz
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch import fx

from embrace_fx.viz import drawing
from embrace_fx.vocabulary.graph import PHASES


class Graphs(Mapping[str, fx.GraphModule]):
    """The graphs of a compiled model by name: as captured, after each compiler pass, and the phases (such as forward
    and backward) that a step runs.

    Args:
        modules: name -> graph, in order.
        phases: for passes that run on a graph divided into phases: name of the pass -> the phases after it.
        variants: name -> function that builds a phase of a variant of the step, such as the first step's.
        sources: returns a dict: name of a phase -> function that returns the Python source of the phase.

    Attributes:
        reason: why the graphs only exchange gradients while the forward runs eagerly, or "" if they contain the
            forward.
    """

    reason = ""

    def __init__(
        self,
        modules: Mapping[str, fx.GraphModule] | None = None,
        phases: Mapping[str, Mapping[str, fx.GraphModule]] | None = None,
        variants: Mapping[str, Callable[[], fx.GraphModule]] | None = None,
        sources: Callable[[], Mapping[str, Callable[[], str]]] = dict,
    ) -> None:
        self._sources = sources
        self._modules = dict(modules or {})
        self._phases = dict(phases or {})
        self._variants = dict(variants or {})

    def __getitem__(self, name: str) -> fx.GraphModule:
        return self._variants[name]() if name in self._variants else self._modules[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._modules, *self._variants))

    def __len__(self) -> int:
        return len(self._modules) + len(self._variants)

    def __repr__(self) -> str:
        return f"Graphs({', '.join(self)}{f'; no graph of the forward: {self.reason}' if self.reason else ''})"

    def set_eager_reason(self, reason: str) -> Graphs:
        """Records the reason why these graphs do not contain the forward. Returns the graphs."""
        self.reason = reason
        return self

    def _repr_html_(self) -> str:
        """Returns a drawing of the phases that a step runs as an SVG, which notebooks show."""
        return drawing.svg(self._final_graphs(), _WHAT_RUNS) if self else "no graph yet"

    def text(self, name: str) -> str:
        """Returns the graph of this name as text, or all of its phases if it is divided into phases."""
        return "\n".join(f"# {phase}\n{_readable(module)}" for phase, module in self._phases_of(name).items())

    def source(self, name: str = "backward") -> str:
        """Returns the Python source of a phase that steps run. Comments name the collective that a line launches or
        awaits.

        Args:
            name: "unique", "ids", "forward" or "backward", or a variant of these that has run.

        Raises:
            ValueError: no such phase has been built.
        """
        if (found := self._sources().get(name)) is None:
            known = ", ".join(map(repr, self._sources())) or "none yet (run a training step first)"
            raise ValueError(f"graphs.source(): there is no phase {name!r}. The known phases are: {known}.")
        return found()

    def diff(self, first: str, second: str) -> str:
        """Returns the differences between the texts of two graphs as a unified diff, or "" if they are equal.

        Args:
            first, second: the names of the graphs.

        Raises:
            KeyError: there is no graph of that name.
        """
        before, after = (self.text(name).splitlines(keepends=True) for name in (first, second))
        return "".join(difflib.unified_diff(before, after, fromfile=first, tofile=second))

    def save(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Draws a graph to a file: compute as blocks in program order, collectives in the colours of their process
        groups.

        Creates missing folders of `path`.

        Args:
            path: ends in `.svg` or `.dot`.
            name: the pass whose result is drawn, or None for the phases that run.

        Raises:
            KeyError: there is no graph of that name.
            ValueError: the suffix is unknown, or there is no graph yet.
        """
        target = Path(path)
        renderers = {".svg": drawing.svg, ".dot": drawing.dot}
        if target.suffix.lower() not in renderers:
            raise ValueError(
                f"graphs.save(): {target.name!r} has no suffix of a supported format. Pass a path that ends in .svg or "
                ".dot."
            )
        if not self:
            raise ValueError("graphs.save(): there is no graph yet. Run a training step first.")
        parts = self._phases_of(name) if name is not None else self._final_graphs()
        text = renderers[target.suffix.lower()](parts, name or _WHAT_RUNS)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def _phases_of(self, name: str) -> Mapping[str, fx.GraphModule]:
        """Returns phase -> graph after the pass `name`. If that pass runs before the graph is divided into phases,
        returns {`name`: the whole graph}.
        """
        return self._phases.get(name) or {name: self[name]}

    def _final_graphs(self) -> Mapping[str, fx.GraphModule]:
        """Returns phase -> graph for the phases that a step runs. If there are no phases yet, returns {name: graph} for
        the last graph.
        """
        ran = {phase: self._modules[phase] for phase in PHASES if phase in self._modules}
        return ran or self._phases_of(list(self._modules)[-1])


_WHAT_RUNS = "what runs in a step"


def _readable(module: fx.GraphModule) -> str:
    """Returns a module's code as torch prints it, without strides and devices."""
    return str(module.print_readable(print_output=False, include_stride=False, include_device=False))
