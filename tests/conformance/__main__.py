"""Runs the bodies of torch's DDP tests on both sides and writes what became of each: `python -m tests.conformance`.

`conformance.md` is the table; `verdicts.json`, which the test compares with, is the same as data.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from tests.conformance.bodies import names
from tests.conformance.not_applicable import reason
from tests.conformance.outcomes import Bench

HERE = Path(__file__).parent
VERDICTS = HERE / "verdicts.json"
TABLE = HERE / "conformance.md"

ORDER = ("passes", "refused", "fails", "hangs", "not applicable")

HEAD = """# torch's own DDP tests

Each test of `DistributedDataParallel` in `torch.testing._internal.distributed.distributed_test`, its body unchanged,
run on 2 ranks with gloo on CPUs: with DDP, and with `embrace_fx.compile` in DDP's place. Where a body asks for a GPU it
gets the CPU. Options that only say how DDP gets to its result (`bucket_cap_mb`, `bucket_cap_mb_list`,
`gradient_as_bucket_view`, `batched_grad_copy`, `find_unused_parameters`, `skip_all_reduce_unused_params`,
`static_graph`, `check_reduction`) are left out. Made by `python -m tests.conformance`, with torch {version}.

{counts}

torch's wheel has no other tests of DDP that run on CPUs, but for those of RPC's distributed autograd
(`ddp_under_dist_autograd_test`), whose contexts a compiled model refuses in a line.

"Refused" is one line that every rank raises. "Not applicable": the body inspects DDP's own machinery, or DDP itself
does not pass it on CPUs.

| test | here | |
|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names of the bodies to run; writes nothing")
    only = parser.parse_args().only
    bench, found = Bench(), {}
    for name in names():
        if only in name:
            found[name] = judged(name, bench)
            print(f"{name}: {' | '.join(found[name])}", flush=True)
    bench.close()
    print(counts(found))
    if not only:
        VERDICTS.write_text(json.dumps({name: verdict for name, (verdict, _) in found.items()}, indent=1) + "\n")
        TABLE.write_text(table(found))


def judged(name: str, bench: Bench) -> tuple[str, str]:
    """Returns a verdict and a line that explains it. If DDP itself does not pass the body, embrace_fx is not run."""
    ddp = bench.run(name, "DDP")
    ours = bench.run(name, "embrace_fx") if ddp.verdict == "passes" else ddp
    why = reason(name, ddp, ours)
    return ("not applicable", why) if why else (ours.verdict, ours.line)


def counts(found: dict[str, tuple[str, str]]) -> str:
    """Returns a sentence with the number of tests for each verdict."""
    count = Counter(verdict for verdict, _ in found.values())
    applicable = len(found) - count["not applicable"]
    told = ", ".join(f"{count[verdict]} {verdict}" for verdict in ORDER if count[verdict])
    return f"Of {len(found)} tests {applicable} apply: {told}."


def table(found: dict[str, tuple[str, str]]) -> str:
    """Returns the page for docs/."""
    import torch  # noqa: PLC0415

    rows = sorted(found.items(), key=lambda item: (ORDER.index(item[1][0]), item[0]))
    head = HEAD.format(version=torch.__version__.split("+")[0], counts=counts(found))
    return head + "".join(f"| `{name}` | {verdict} | {_cell(line)} |\n" for name, (verdict, line) in rows)


def _cell(line: str) -> str:
    """Returns a line for a cell of a Markdown table, without the text that differs from run to run."""
    line = " ".join(line.split())
    short = line if len(line) <= 240 else f"{line[:240]}..."
    return short.replace("|", "\\|").replace("<", "&lt;").replace(str(HERE.parent.parent) + "/", "")


if __name__ == "__main__":
    main()
