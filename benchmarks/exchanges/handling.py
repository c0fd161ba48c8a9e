"""What a rank's processor does in an exchange, timed without any network: the defaults of `cost.Handling`.

    python -m benchmarks.exchanges.handling

One thread on one core, by the functions that the probe measures with on all ranks at once; then what each row takes,
for rows of several sizes, beside what these rates say.
"""

from __future__ import annotations

import torch

from embrace_fx.cost.links import Cluster, Work
from embrace_fx.runtime.probe.handling import HANDLED_ROWS, PASSES, WIDE, make_exchange_work
from embrace_fx.runtime.probe.probe import CPU, measure_handling, together_ms
from embrace_fx.runtime.ranks.communicator import Communicator

WIDTHS = (1, 8, 64, 256, 512, 1024)
HANDLED_BYTES = HANDLED_ROWS[WIDE] * WIDE * 4


def main() -> None:
    torch.set_num_threads(1)
    alone = Communicator(None)
    rates = measure_handling(alone)
    print(
        f"search {rates.scan_bytes_per_ms:.3g} bytes per ms, a pass {rates.pass_bytes_per_ms:.3g}, new memory "
        f"{rates.claim_bytes_per_ms:.3g}; a unit {rates.unit_ms * 1e6:.0f} ns, a round {rates.round_ms:.3f} ms\n"
    )
    print("| values of a row | to handle one, ns | at these rates |\n|---|---|---|")
    for width in WIDTHS:
        rows = HANDLED_BYTES // 4 // width
        each_ms = together_ms(alone, make_exchange_work(width, rows, CPU)) / rows
        told = Work(passed_bytes=PASSES * width * 4, units=1).time_ms(Cluster(handling=rates))
        print(f"| {width} | {each_ms * 1e6:.0f} | {told * 1e6:.0f} |")


if __name__ == "__main__":
    main()
