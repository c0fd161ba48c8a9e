"""The colours of every picture, in light and in dark: one for each category of compute, and one for each lane.

The communication classes differ in hue, close to Okabe and Ito (Color Universal Design, 2008), and the bluish ones also
in lightness, so that they are distinguishable with any colour blindness. The model's compute is grey, in clearly
different lightness. The optimizer, the user's code and the loader have other hues. A wait is hatched in the colour of
its class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from embrace_fx.vocabulary.operation_id import Lane
from embrace_fx.vocabulary.schedule import Operation
from embrace_fx.vocabulary.step_parts import Share


@dataclass(frozen=True)
class Theme:
    """The CSS colours of the light or the dark theme of pictures.

    Attributes:
        page: the background.
        strip: the background of a lane, on which its operations are drawn.
        line: separating lines.
        faint: secondary text.
        text: other text.
        critical: the critical path.
        fill: key of `PAINTS` -> the colour of an operation.
        ink: key of `PAINTS` -> the colour of text on that operation.
    """

    page: str
    strip: str
    line: str
    faint: str
    text: str
    critical: str
    fill: Mapping[str, str]
    ink: Mapping[str, str]


PAINTS: Mapping[str, str] = {
    "backward": "backward",
    "forward": "forward",
    "update": "optimizer",
    "own": "your code",
    "loader": "loader",
    "ids": "ids",
    "embedding": "embedding",
    "dense": "dense",
    "delayed": "delayed",
    "offload": "offload",
    "reload": "reload",
    "storage": "storage",
}
"""Paint -> its name in a legend: kinds of compute, communication classes, copies."""

_INK = "#0b0d10"
"""Text colour on all but the darkest colours."""

LIGHT = Theme(
    page="#ffffff",
    strip="#f4f6f8",
    line="#c9d0d8",
    faint="#5b6673",
    text="#15191e",
    critical="#15191e",
    fill={
        "backward": "#97a3b0",
        "forward": "#d3dae2",
        "update": "#b493dc",
        "own": "#ead94c",
        "loader": "#e0609b",
        "ids": "#8ccff5",
        "embedding": "#e69f00",
        "dense": "#005a9c",
        "delayed": "#12a078",
        "offload": "#b5483a",
        "reload": "#f2b5a7",
        "storage": "#6b4f2a",
    },
    ink=dict.fromkeys(PAINTS, _INK) | dict.fromkeys(("dense", "offload", "storage"), "#ffffff"),
)

DARK = Theme(
    page="#14181d",
    strip="#1c2128",
    line="#3a434e",
    faint="#a3afbc",
    text="#eef2f6",
    critical="#ffffff",
    fill={
        "backward": "#7f8c9a",
        "forward": "#434d58",
        "update": "#a486d4",
        "own": "#e3d24a",
        "loader": "#e0609b",
        "ids": "#b8e6ff",
        "embedding": "#eaa91a",
        "dense": "#2877c0",
        "delayed": "#4fd1a5",
        "offload": "#d8705f",
        "reload": "#f7cdc3",
        "storage": "#b98d52",
    },
    ink=dict.fromkeys(PAINTS, _INK) | dict.fromkeys(("forward", "dense"), "#ffffff"),
)


OF_SHARE: Mapping[Share, str] = {
    "loader": "loader",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "update",
    "your code": "own",
}
"""Compute part of a step -> its paint."""


def paint(operation: Operation) -> str:
    """Returns the key in `PAINTS` of an operation's colour: its category for compute, its lane for communication and
    copies.
    """
    return OF_SHARE.get(operation.share, operation.lane)


def lane_paint(lane: Lane) -> str:
    """Returns the key in `PAINTS` of the colour that represents a lane."""
    return "backward" if lane == "compute" else lane
