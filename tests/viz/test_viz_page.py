"""The page in a browser, without a network: what is seen, pointed at, pressed and chosen."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from embrace_fx import viz
from embrace_fx.vocabulary.operation_id import CLASS_LANES
from embrace_fx.vocabulary.picture_facts import PictureFacts, StepEstimate, TablePlace
from embrace_fx.vocabulary.schedule import Operation, Schedule, Span, Timeline

SENT = ("compute", *CLASS_LANES)
"""The lanes of steps that copy nothing."""

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install 'embrace-fx[browser]'"
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=f"no browser on this machine: none of {', '.join(BROWSERS)}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # Chromium's sandbox does not work for root in a container.
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab without network that fails the test on any error it reports, or anything it asks for but the file."""
    context = browser.new_context(offline=True, viewport={"width": 1400, "height": 1100})
    tab = context.new_page()
    complaints: list[str] = []
    tab.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda request: None if request.url.startswith("file:") else complaints.append(request.url))
    yield tab
    context.close()
    assert complaints == []


def opened(
    tab: Any,
    folder: Path,
    schedule: Schedule | None = None,
    timeline: Timeline | None = None,
    background: PictureFacts | None = None,
) -> Any:
    path = folder / "picture.html"
    viz.save(path, schedule=schedule, timeline=timeline, background=background)
    tab.goto(path.as_uri())
    return tab


def found_along(tab: Any, panel: str, lane: str, text: str) -> str:
    """Moves the pointer along a lane of the panel's first rank until the tip has `text`; returns the tip."""
    label = tab.locator(f"#{panel} .lane", has_text=lane).first.bounding_box()
    box = tab.locator(f"#{panel}").bounding_box()
    for x in range(130, int(box["width"]), 3):
        tab.mouse.move(box["x"] + x, label["y"] + label["height"] / 2)
        tip = tab.locator("#tip")
        if tip.is_visible() and text in tip.inner_text():
            return str(tip.inner_text())
    raise AssertionError(f"nothing with {text!r} along lane {lane} of the {panel} panel")


def drawn_pixels(tab: Any, panel: str) -> bytes:
    tab.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return bytes(tab.locator(f"#{panel}").screenshot())


def test_lanes_of_every_rank_and_the_figures(tab: Any, tmp_path: Path, schedule: Schedule, timeline: Timeline) -> None:
    opened(tab, tmp_path, schedule, timeline)
    assert [name for name in tab.locator("#predicted .strip-of .lane").all_text_contents() if name in SENT] == [*SENT]
    assert tab.locator("#measured .strip-of .lane").all_text_contents() == [*SENT] * 4
    assert tab.locator("#measured .rank").all_text_contents() == [f"rank {k}" for k in range(4)]
    step = tab.locator("#figures tbody tr").first.inner_text()
    assert f"{schedule.diagnostics().step_ms:.2f} ms" in step
    assert f"{timeline.diagnostics().step_ms:.2f} ms" in step
    assert tab.locator("#legend").inner_text().count("wait") > 0


def test_pointing_at_a_communication_tells_bytes_and_times(
    tab: Any, tmp_path: Path, schedule: Schedule, timeline: Timeline
) -> None:
    opened(tab, tmp_path, schedule, timeline)
    tip = found_along(tab, "predicted", "embedding", "embedding prior gradients")
    assert "sends\n512.0 KiB" in tip
    assert "serves\nembedding" in tip
    assert "predicted\n0.800 ms" in tip
    (span,) = [
        s for s in timeline.spans if s.operation.name == "embedding prior gradients" and (s.window, s.rank) == (0, 0)
    ]
    assert f"measured\n{span.end_ms - span.start_ms:.3f} ms on rank 0" in tip


def test_pointing_at_a_wait_tells_what_is_waited_for(tab: Any, tmp_path: Path, timeline: Timeline) -> None:
    opened(tab, tmp_path, timeline=timeline)
    wait = min((w for w in timeline.waits if w.rank == 0), key=lambda w: w.start_ms)
    tip = found_along(tab, "measured", "compute", "waits for")
    assert wait.launch in tip
    assert f"{wait.end_ms - wait.start_ms:.3f} ms" in tip


def test_the_critical_path_can_be_left_out(tab: Any, tmp_path: Path, schedule: Schedule) -> None:
    opened(tab, tmp_path, schedule)
    assert tab.locator("#shown").is_hidden(), "there is one panel only"
    shown = drawn_pixels(tab, "predicted")
    tab.locator("#critical").uncheck()
    assert drawn_pixels(tab, "predicted") != shown


def test_keys_go_from_operation_to_operation(tab: Any, tmp_path: Path, schedule: Schedule) -> None:
    opened(tab, tmp_path, schedule)
    tab.locator("#predicted").focus()
    seen = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp", "ArrowLeft"):
        tab.keyboard.press(key)
        seen.append(tab.locator("#detail strong").inner_text().partition(":")[0])
    assert seen[:2] == ["backward encoder.5", "backward encoder.4"]
    assert seen[2] == "next ids"
    assert "needed by\nsoftmax prior gradients, look up softmax" in _pressed(tab, "ArrowDown", "next ids")
    tab.keyboard.press("Escape")
    assert tab.locator("#detail").inner_text() == ""


def _pressed(tab: Any, key: str, name: str) -> str:
    """Presses `key` until `name` is selected. Returns the text that the page then shows."""
    for _ in range(20):
        tab.keyboard.press(key)
        if tab.locator("#detail strong").inner_text().startswith(f"{name}:"):
            return str(tab.locator("#detail").inner_text())
    raise AssertionError(f"{name!r} was not reached by {key}")


@pytest.mark.parametrize("way", ["wheel", "keys", "buttons"])
def test_zooming_and_coming_back(tab: Any, tmp_path: Path, schedule: Schedule, way: str) -> None:
    opened(tab, tmp_path, schedule)
    fitted = drawn_pixels(tab, "predicted")
    panel = tab.locator("#predicted")
    if way == "wheel":
        panel.hover(position={"x": 140, "y": 3})
        tab.keyboard.down("Control")
        tab.mouse.wheel(0, -400)
        tab.keyboard.up("Control")
    elif way == "keys":
        panel.focus()
        tab.keyboard.press("+")
    else:
        tab.locator("#zoom-in").click()
    tab.wait_for_function("state.end - state.start < 60")
    assert drawn_pixels(tab, "predicted") != fitted
    tab.locator("#zoom-fit").click()
    tab.mouse.move(0, 0)
    tab.locator("#zoom-fit").blur()
    assert drawn_pixels(tab, "predicted") == fitted


def test_dark_follows_the_system_and_the_button(browser: Any, tmp_path: Path, schedule: Schedule) -> None:
    grounds = {}
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)
        tab = opened(context.new_page(), tmp_path, schedule)
        ground = "getComputedStyle(document.body).backgroundColor"
        first = tab.evaluate(ground), drawn_pixels(tab, "predicted")
        tab.locator("#theme").click()
        tab.locator("#theme").blur()
        tab.mouse.move(0, 0)
        grounds[scheme] = (first, (tab.evaluate(ground), drawn_pixels(tab, "predicted")))
        context.close()
    assert grounds["light"] == grounds["dark"][::-1]
    assert grounds["light"][0] != grounds["light"][1]


AROUND = PictureFacts(
    150.0,
    (StepEstimate(2, 40.0, 100.0), StepEstimate(8, 60.0, 200.0)),
    (TablePlace("users.weight", (90, 8), "alltoall", ("columns 0 to 3", "columns 4 to 7"), 2880, 0.8, 0.25),),
)


@pytest.mark.parametrize("width", [1400, 480])
def test_what_stands_around_a_schedule(tab: Any, tmp_path: Path, schedule: Schedule, width: int) -> None:
    tab.set_viewport_size({"width": width, "height": 900})
    opened(tab, tmp_path, schedule, background=AROUND)

    assert "DDP, estimated" in tab.locator("#bars").inner_text()
    longest = tab.locator("#bars .bar").last.locator(".track").bounding_box()
    parts = [part.bounding_box() for part in tab.locator("#bars .bar").last.locator(".part").all()]
    assert sum(box["width"] for box in parts) == pytest.approx(longest["width"], abs=3)
    assert tab.locator("#tables tbody tr").inner_text().split("\n")[0].startswith("users.weight")
    assert "80 %" in tab.locator("#tables").inner_text()
    assert tab.locator("#ranks .bar").count() == 4
    assert tab.locator("#words").is_hidden()
    tab.locator("#glossary summary").focus()
    tab.keyboard.press("Enter")
    assert "compute stands still for communication" in tab.locator("#words").inner_text()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width  # no horizontal scrolling


def test_time_in_which_nothing_runs_has_a_name(tab: Any, tmp_path: Path) -> None:
    first, second = (
        Operation("backward a", "backward", "compute", 1.0),
        Operation("forward a", "forward", "compute", 1.0),
    )
    opened(tab, tmp_path, timeline=Timeline((Span(first, 0, 0, 0.0, 1.0), Span(second, 0, 0, 4.0, 5.0)), (), 1))
    assert "between operations: 3.000 ms" in found_along(tab, "measured", "compute", "Python and autograd")
    assert "between operations\t3.00 ms" in tab.locator("#figures").inner_text()


@pytest.mark.parametrize("width", [1280, 420])
def test_no_word_in_a_bar_is_cut_in_two(
    tab: Any, tmp_path: Path, schedule: Schedule, timeline: Timeline, width: int
) -> None:
    tab.set_viewport_size({"width": width, "height": 900})
    opened(tab, tmp_path, schedule, timeline, PictureFacts(500.0, (StepEstimate(2, 1.0, 500.0),), ()))

    words = tab.locator("#bars .part span").evaluate_all(
        """all => all.map(word => {
            const [own, bar] = [word.getBoundingClientRect(), word.parentElement.getBoundingClientRect()];
            return [own.right <= bar.right + 0.5, own.top >= bar.bottom - 1.5];
        })"""
    )

    assert words
    assert all(inside or hidden for inside, hidden in words)
    assert any(hidden for _, hidden in words)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
