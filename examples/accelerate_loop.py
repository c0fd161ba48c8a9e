"""A loop written for Accelerate, once with `Accelerator` and once with `EmbraceAccelerator`: the same losses.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py --system embrace_fx --output build/accelerate

It accumulates gradients, clips them, logs their norm, evaluates, saves and, with `--resume`, goes on from what was
saved, on any number of ranks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from random_words import Network, Sentences
from torch.utils.data import DataLoader

from embrace_fx.integrations.accelerate import EmbraceAccelerator

BATCH = 4


def train(accelerator: Any, arguments: argparse.Namespace) -> list[float]:
    """Runs the training loop, which works with any accelerator."""
    torch.manual_seed(0)
    steps, accumulate = arguments.steps, arguments.accumulate
    model: Any = Network().double()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    loader: Any = DataLoader(Sentences(16 * steps * accumulate, 1, torch.double), BATCH)
    test: Any = DataLoader(Sentences(32, 2, torch.double), BATCH)
    model, optimizer, loader, test = accelerator.prepare(model, optimizer, loader, test)
    if arguments.resume is not None:
        accelerator.load_state(str(arguments.resume))
    losses, norms, stepped = [], [], 0
    for words, targets in loader:
        with accelerator.accumulate(model):
            loss = F.binary_cross_entropy_with_logits(model(words), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach()).mean()))
        stepped += accelerator.sync_gradients
        if stepped == steps:
            break
    model.eval()
    with torch.no_grad():
        scores = [accelerator.gather(F.binary_cross_entropy_with_logits(model(w), t)) for w, t in test]
    accelerator.save_state(str(arguments.output / "state"))
    return [*losses, *norms, float(torch.stack(scores).mean())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=("embrace_fx", "ddp"), default="embrace_fx")
    parser.add_argument("--output", type=Path, default=Path("build/accelerate"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--mixed-precision", default="no")
    parser.add_argument("--strategy", help="of embrace_fx.compile")
    parser.add_argument("--resume", type=Path, help="a folder that save_state has written")
    arguments = parser.parse_args()
    options: dict[str, Any] = {
        "cpu": True,
        "gradient_accumulation_steps": arguments.accumulate,
        "mixed_precision": arguments.mixed_precision,
    }
    if arguments.system == "embrace_fx":
        compile_options = {"strategy": arguments.strategy} if arguments.strategy else {}
        accelerator: Any = EmbraceAccelerator(compile_options=compile_options, **options)
    else:
        accelerator = Accelerator(**options)
    losses = train(accelerator, arguments)
    if accelerator.is_main_process:
        (arguments.output / "losses.json").write_text(json.dumps(losses))
        print(f"losses: first {losses[0]:.6f}, last {losses[arguments.steps - 1]:.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
