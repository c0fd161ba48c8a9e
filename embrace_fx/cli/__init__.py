"""The command line: `embrace-fx plan`, `show`, `doctor`, `bench`."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embrace_fx.cost.links import Cluster

if TYPE_CHECKING:
    from embrace_fx.vocabulary.plan import Plan
    from embrace_fx.what_if import Forecast

FACTORY = "a function without arguments that returns (model, batch) or (model, batch, optimizer)"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="embrace-fx")
def main() -> None:
    """Plans, pictures and checks for models trained with embrace_fx."""


FORMATS = (".txt", ".json", ".html", ".svg", ".dot")
"""The suffixes of files that `embrace-fx plan` writes."""


@main.command()
@click.argument("factory")
@click.option("--world-size", type=click.IntRange(1), default=8, show_default=True, help="ranks to plan for")
@click.option(
    "--cluster",
    type=click.Path(exists=True, dir_okay=False),
    help="JSON file of an embrace_fx.Cluster; default: 25 Gb/s",
)
@click.option("--bandwidth", help="bandwidth of the links, such as 25Gb/s or 3GB/s; in place of --cluster")
@click.option("--device", help="a device of embrace_fx.DEVICES, such as h100; in place of --cluster")
@click.option(
    "--schedule", default="auto", show_default=True, type=click.Choice(["auto", "2d", "horizontal", "vertical", "none"])
)
@click.option(
    "--row-updates", default="exact", show_default=True, type=click.Choice(["exact", "sweep", "replay", "lazy"])
)
@click.option(
    "--output", type=click.Path(dir_okay=False), multiple=True, help="file to write: .txt, .json, .html, .svg or .dot"
)
def plan(
    factory: str,
    world_size: int,
    cluster: str | None,
    bandwidth: str | None,
    device: str | None,
    schedule: Any,
    row_updates: Any,
    output: tuple[str, ...],
) -> None:
    """Predicts the plan and the step of FACTORY's model on any cluster. Needs only one process and no network.

    FACTORY is module:function, a function without arguments that returns (model, batch) or (model, batch, optimizer).
    """
    import embrace_fx  # noqa: PLC0415  (`--help` needs no torch)

    model, batch, optimizer = call_factory(factory)
    if cluster is not None and (bandwidth or device):
        raise click.UsageError(
            "--cluster cannot be combined with --bandwidth or --device, because a cluster file already describes the "
            "links and devices. Pass either --cluster, or the other two options."
        )
    for path in map(Path, output):
        if path.suffix not in FORMATS:
            raise click.UsageError(
                f"--output: {path.name!r} has no suffix of a supported format. Pass a path that ends in "
                f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}."
            )
    links = make_cluster(bandwidth, device) if cluster is None else read_cluster(Path(cluster))
    with usage_errors():
        forecast = embrace_fx.plan(
            model,
            batch,
            world_size=world_size,
            cluster=links,
            optimizer=optimizer,
            schedule=schedule,
            row_updates=row_updates,
        )
        text = f"{forecast}\n{forecast.schedule}"
        for path in map(Path, output):
            write_forecast(forecast, text, path)
            click.echo(f"wrote {path}", err=True)
    if not output:
        click.echo(text)


def write_forecast(forecast: Forecast, text: str, path: Path) -> None:
    """Writes a forecast to a file. The suffix of the path decides the format: text (.txt), a trace (.json), or a
    picture (.html, .svg or .dot).

    Args:
        text: the forecast as text, which is written to a .txt file.
    """
    if path.suffix == ".txt":
        path.write_text(text, encoding="utf-8")
    elif path.suffix == ".json":
        _write_json(forecast, path)
    else:
        forecast.schedule.save(path)


def _write_json(forecast: Forecast, path: Path) -> None:
    """Writes a forecast's schedule as a trace, which `embrace-fx show` and Perfetto can open. The file also contains
    the plan.
    """
    forecast.schedule.save(path)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    found |= {"plan": forecast.to_dict(), "sent_bytes_per_step": forecast.sent_bytes_per_step}
    found |= {
        "schedule": asdict(forecast.schedule.diagnostics()),
        "launch_order": forecast.schedule.launch_order,
    }
    path.write_text(json.dumps(found, indent=1), encoding="utf-8")


@main.command()
@click.argument("saved", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--output",
    type=click.Path(dir_okay=False),
    help="picture to write: .html, .svg or .dot; default: open it in a browser",
)
def show(saved: str, output: str | None) -> None:
    """Opens a saved schedule or timeline in a browser, or prints a saved plan.

    A schedule or timeline that was saved as .json is drawn first.
    """
    source = Path(saved)
    if source.suffix != ".json":
        if output is not None:
            raise click.UsageError(
                f"{source.name} cannot be converted, because it is not a .json file. Pass a schedule or timeline that "
                "was saved as .json."
            )
        _open_page(source)
        return
    from embrace_fx.viz import save, trace  # noqa: PLC0415

    with usage_errors():
        if (planned := read_plan(source)) is not None:
            click.echo(str(planned))
            return
        schedule, timeline = trace.read_trace(source)
        # Do not write next to the saved file, because this could overwrite a page that shows more.
        target = Path(output or Path(tempfile.mkdtemp(prefix="embrace-fx-"), f"{source.stem}.html"))
        save(target, schedule=schedule, timeline=timeline)
    click.echo(f"wrote {target}")
    if output is None:
        _open_page(target)


def read_plan(path: Path) -> Plan | None:
    """Returns the plan in a .json file, or None if the file contains no plan."""
    from embrace_fx.vocabulary.plan import Plan  # noqa: PLC0415

    try:
        return Plan.load(path)
    except ValueError:
        return None


def _open_page(page: Path) -> None:
    """Opens the file `page` in a browser, or prints that there is no browser."""
    if not webbrowser.open(page.resolve().as_uri()):
        click.echo(f"No browser was found. Open {page.resolve()} in a browser", err=True)


@main.command()
def doctor() -> None:
    """Reports which features of embrace_fx work on this machine, which do not, and why. Under torchrun, it also
    measures the links between the ranks.

    The exit status is 1 if a check fails.
    """
    import torch.distributed as dist  # noqa: PLC0415

    from embrace_fx.cli.examine import Finding, probe_links, run_checks  # noqa: PLC0415

    findings = run_checks(os.environ)
    fails = any(finding.state == "fails" for finding in findings)
    if not fails and "RANK" in os.environ:
        try:
            dist.init_process_group()
            findings.append(probe_links())
            dist.destroy_process_group()
        except Exception as error:  # doctor reports any failure
            findings.append(Finding("links", "fails", str(error), "see that all ranks run and reach each other"))
            fails = True
    if os.environ.get("RANK", "0") == "0" or fails:
        for finding in findings:
            color = {"works": "green", "limits": "yellow", "fails": "red"}[finding.state]
            click.echo(f"{click.style(f'{finding.state:7}', fg=color)}{finding.subject}: {finding.found}")
            if finding.to_do:
                click.echo(f"       {finding.to_do}")
    sys.exit(fails)


@main.command()
@click.argument("factory")
@click.option(
    "--steps",
    type=click.IntRange(2),
    default=20,
    show_default=True,
    help="measured steps of each system after warm-up, rounded up to a multiple of 5",
)
def bench(factory: str, steps: int) -> None:
    """Times FACTORY's model under DDP and under embrace_fx, in turns, on the ranks that torchrun starts.

    torchrun --nproc-per-node 2 -m embrace_fx.cli bench module:function
    """
    from embrace_fx.cli.side_by_side import compare  # noqa: PLC0415

    if "RANK" not in os.environ:
        command = f"torchrun --standalone --nproc-per-node 2 -m embrace_fx.cli bench {factory}"
        raise click.UsageError(f"This command needs several ranks. Start it with: {command}")
    with usage_errors():
        lines = compare(lambda: call_factory(factory), steps)
    if os.environ["RANK"] == "0":
        click.echo("\n".join(lines))


def call_factory(factory: str) -> tuple[Any, Any, Any]:
    """Calls a factory, given as "module:function". Returns (model, batch, optimizer). The optimizer may be None."""
    name, colon, function = factory.partition(":")
    if not colon:
        raise click.UsageError(
            f"{factory!r} is not of the form module:function. Pass module:function, the name of {FACTORY}."
        )
    sys.path.insert(0, os.getcwd())
    try:
        make: Callable[[], Any] = getattr(importlib.import_module(name), function)
    except (ImportError, AttributeError) as error:
        raise click.UsageError(
            f"{factory!r} cannot be loaded: {error}. Pass module:function, the name of {FACTORY}."
        ) from error
    made = make()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        kind = f"{type(made).__name__} of {len(made)} values" if isinstance(made, tuple) else type(made).__name__
        raise click.UsageError(f"{factory} returned a {kind}. Pass module:function, the name of {FACTORY}.")
    return made if len(made) == 3 else (*made, None)


_RATE = re.compile(r"(\d+(?:\.\d+)?) *([KMGT])(b|bit|B)(?:/s|ps)", re.IGNORECASE)


def make_cluster(bandwidth: str | None, device: str | None) -> Cluster:
    """Returns a cluster with the given link bandwidth and device, or `Cluster()` if neither is given.

    >>> make_cluster("25Gb/s", None) == Cluster()
    True
    >>> make_cluster("3 GB/s", "h100").compute.launch_ms
    0.005
    """
    from embrace_fx.cost.devices import DEVICES  # noqa: PLC0415

    rate = Cluster().bandwidth_bytes_per_ms
    if bandwidth is not None:
        found = _RATE.fullmatch(bandwidth.strip())
        if found is None or not float(found[1]):
            raise click.UsageError(
                f"--bandwidth {bandwidth!r} is not a data rate. Write, for example, 25Gb/s or 3GB/s."
            )
        power = "KMGT".index(found[2].upper()) + 1
        rate = float(found[1]) * 1000**power / (1 if found[3] == "B" else 8) / 1000
    if device is None:
        return Cluster(bandwidth_bytes_per_ms=rate)
    known = {name.lower(): each for name, each in DEVICES.items()}
    if device.lower() not in known:
        raise click.UsageError(f"--device {device!r} is not a known device. Pass one of {', '.join(DEVICES)}.")
    return known[device.lower()].cluster(rate)


def read_cluster(path: Path) -> Cluster:
    """Reads a cluster from a JSON file with the arguments of `embrace_fx.Cluster`."""
    from embrace_fx.vocabulary.plain_data import from_plain  # noqa: PLC0415

    try:
        found: Cluster = from_plain(Cluster, json.loads(path.read_text(encoding="utf-8")), "Cluster")
    except ValueError as error:
        raise click.UsageError(
            f"{path} does not describe a cluster: {error}. Write a JSON object such as "
            '{"bandwidth_bytes_per_ms": 3.1e6, "latency_ms": 0.05}.'
        ) from error
    return found


@contextmanager
def usage_errors() -> Iterator[None]:
    """Opens a context that turns a `ValueError` or `RuntimeError` into a one-line error message of the command, without
    a traceback.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
