"""Hugging Face's Trainer on a small BERT, once as it is, over DDP, and once as `EmbraceTrainer`: the same losses.

    torchrun --nproc-per-node 2 examples/trainer_loop.py --system embrace_fx --output build/trainer

It clips gradients, logs their norm, evaluates, saves checkpoints with safetensors and, with `--resume`, goes on from
one, on any number of ranks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from embrace_fx.integrations.transformers import EmbraceTrainer

NUM_WORDS, LENGTH, BATCH = 200, 6, 4


class Sentences(Dataset[dict[str, Any]]):
    """Random words, and whether the first one is from the first half of the vocabulary."""

    def __init__(self, size: int, seed: int) -> None:
        self.words = torch.randint(NUM_WORDS, (size, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = self.words[index]
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": int(words[0] < NUM_WORDS // 2)}


def model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=NUM_WORDS,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=("embrace_fx", "ddp"), default="embrace_fx")
    parser.add_argument("--output", type=Path, default=Path("build/trainer"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--resume", type=Path, help="a folder checkpoint-N that a run has saved")
    arguments = parser.parse_args()
    set_seed(0)
    training = TrainingArguments(
        output_dir=str(arguments.output),
        max_steps=arguments.steps,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=arguments.accumulate,
        learning_rate=1e-3,
        adam_epsilon=1e-3,
        max_grad_norm=0.5,
        bf16=arguments.bf16,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=10,
        save_steps=10,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        ddp_backend="gloo",
    )
    kind = EmbraceTrainer if arguments.system == "embrace_fx" else Trainer
    size = 16 * BATCH * arguments.steps
    trainer = kind(model(), training, train_dataset=Sentences(size, 1), eval_dataset=Sentences(32, 2))
    trainer.train(resume_from_checkpoint=str(arguments.resume) if arguments.resume else None)
    if trainer.is_world_process_zero():
        told = ("step", "loss", "grad_norm", "eval_loss")
        kept = [{key: entry[key] for key in told if key in entry} for entry in trainer.state.log_history]
        (arguments.output / "log.json").write_text(json.dumps(kept))
        print(f"last loss: {[entry['loss'] for entry in kept if 'loss' in entry][-1]:.6f}")


if __name__ == "__main__":
    main()
