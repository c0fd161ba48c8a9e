"""Hugging Face's Trainer on a tiny GPT-2, over DDP or with a sharded output layer; run by torchrun.

Writes what it logs. `compute_metrics` gets logits, which the first steps of an evaluation's batch make.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed

from embrace_fx.integrations.transformers import EmbraceTrainer
from tests.support.published_heads import HEADS, IGNORED, NUM_WORDS

HEAD = HEADS["gpt2"]


class Sentences(Dataset[dict[str, Any]]):
    """Random words; the last ones of some are not scored."""

    def __init__(self, size: int, seed: int) -> None:
        self.words = torch.randint(3, NUM_WORDS, (size, 7), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = self.words[index]
        labels = words.clone()
        labels[3 + index % 4 :] = IGNORED
        return {"input_ids": words, "labels": labels}


def metrics(found: EvalPrediction) -> dict[str, float]:
    logits: Any = found.predictions
    labels: Any = found.label_ids
    right = logits[:, :-1].argmax(-1) == labels[:, 1:]
    return {"right": float(right.mean()), "spread": float(logits.std()), "count": float(logits.size)}


def main(system: str, output: str, smoothing: str, resume: str = "") -> None:
    set_seed(0)
    arguments = TrainingArguments(
        output_dir=output,
        max_steps=6,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        label_smoothing_factor=float(smoothing),
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        ddp_backend="gloo",
    )
    kind = EmbraceTrainer if system == "embrace_fx" else Trainer
    model: Any = HEAD.make(torch.float32, own_loss=True)
    trainer = kind(
        model, arguments, train_dataset=Sentences(64, 1), eval_dataset=Sentences(9, 2), compute_metrics=metrics
    )
    accelerator: Any = trainer.accelerator
    accelerator.compile_options = {"strategy": {HEAD.table: "vocabulary"}}
    trainer.train(resume_from_checkpoint=resume or None)
    if system == "embrace_fx":
        wrapped: Any = trainer.model_wrapped
        assert wrapped.plan[HEAD.table].strategy == "vocabulary", wrapped.plan[HEAD.table].reason
    if trainer.is_world_process_zero():
        kept = ("loss", "grad_norm", "eval_loss", "eval_right", "eval_spread", "eval_count")
        log = [{key: entry[key] for key in kept if key in entry} for entry in trainer.state.log_history]
        (Path(output) / "log.json").write_text(json.dumps(log))


if __name__ == "__main__":
    main(*sys.argv[1:])
