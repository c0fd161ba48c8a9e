"""A LightningModule, once with `strategy="ddp"` and once with `EmbraceStrategy`: the same losses.

    torchrun --nproc-per-node 2 examples/lightning_loop.py --system embrace_fx --output build/lightning

It accumulates and clips gradients, evaluates, logs, saves a checkpoint and, with `--resume`, goes on from one, on any
number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from random_words import Network, Sentences
from torch import Tensor
from torch.utils.data import DataLoader

from embrace_fx.integrations.lightning import EmbraceStrategy

BATCH = 4


class Classifier(lightning.LightningModule):
    """A LightningModule that works with any strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Network()
        self.losses: list[float] = []

    def scores(self, words: Tensor) -> Tensor:
        found: Tensor = self.net(words)
        return found

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        words, targets = batch
        loss = F.binary_cross_entropy_with_logits(self.scores(words), targets)
        self.log("loss", loss)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        words, targets = batch
        loss = F.binary_cross_entropy_with_logits(self.scores(words), targets)
        self.log("validation loss", loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class OfParts(Classifier):
    """The same network, with its parts in the LightningModule itself and a forward, which the steps call as
    `self(...)`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = self.net.words, self.net.layers
        del self.net

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.layers(self.words(words).mean(1)).squeeze(-1)
        return found

    def scores(self, words: Tensor) -> Tensor:
        found: Tensor = self(words)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=("embrace_fx", "ddp"), default="embrace_fx")
    parser.add_argument("--output", type=Path, default=Path("build/lightning"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--of-parts", action="store_true", help="several children of the module have parameters")
    parser.add_argument("--strategy", default="auto", help="of every table: alltoall shards it")
    parser.add_argument("--resume", type=Path, help="a checkpoint that a run has saved")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    strategy: Any = "ddp"
    if arguments.system == "embrace_fx":
        strategy = EmbraceStrategy(process_group_backend="gloo", compile_options={"strategy": arguments.strategy})
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=strategy,
        precision=arguments.precision,
        max_steps=arguments.steps,
        accumulate_grad_batches=arguments.accumulate,
        gradient_clip_val=0.5,
        val_check_interval=10 * arguments.accumulate,
        default_root_dir=str(arguments.output),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = OfParts() if arguments.of_parts else Classifier()
    size = 16 * BATCH * arguments.steps * arguments.accumulate
    loaders = DataLoader(Sentences(size, 1), BATCH), DataLoader(Sentences(32, 2), BATCH)
    trainer.fit(module, *loaders, ckpt_path=str(arguments.resume) if arguments.resume else None)
    trainer.save_checkpoint(arguments.output / "last.ckpt")
    trainer.validate(module, loaders[1], verbose=False)
    if trainer.is_global_zero:
        found = [*module.losses, float(trainer.callback_metrics["validation loss"])]
        (arguments.output / "losses.json").write_text(json.dumps(found))
        print(f"losses: first {found[0]:.6f}, last {module.losses[-1]:.6f}")


if __name__ == "__main__":
    main()
