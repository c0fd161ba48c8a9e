"""Models with an output layer over a table, of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from tests.support.scenario import Training, scenario
from tests.support.scenarios.heads import DIM, IGNORED, NUM_WORDS, Words, draw


class WithLoss(Words):
    """Returns the loss and the logits, or only the logits if there are no labels."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, ignore_index=IGNORED)

    def forward(self, words_BT: Tensor, labels_BT: Tensor | None = None) -> Any:
        logits = self.head(self.hidden(words_BT))
        return logits if labels_BT is None else (self.loss(logits.flatten(0, 1), labels_BT.flatten()), logits)


class Predicting:
    """A model whose table is sharded by its output layer, and its optimizer."""

    def __init__(self, training: Training, module: Any, *, table: str = "words.weight", whole: bool = False):
        self.training, self.module, self.table, self.whole = training, module, table, whole
        self.model = training.wrap(module, strategy={table: "vocabulary"})
        trained = [each for each in module.parameters() if each.requires_grad]
        self.optimizer: Any = training.optimize(AdamW, trained, lr=0.02, eps=1e-3)

    def loss(self, step: int) -> Tensor:
        """The model's own."""
        found: Tensor = self.model(*draw(self.training, step))[0]
        self.training.note(found)
        return found

    def logits(self, step: int) -> tuple[Tensor, Tensor]:
        """Returns the logits and the labels."""
        words, labels = draw(self.training, step)
        return self.model(words), labels

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int) -> Iterator[int]:
        """Yields the numbers of steps. After each, takes the optimizer's step; at the end, asserts as `check` does."""
        for step in range(count):
            yield step
            self.step()
        self.check()

    def check(self) -> None:
        """Asserts that the table is sharded, or whole."""
        if self.training.is_compiled:
            decision = self.model.plan[self.table]
            assert (decision.strategy == "vocabulary") != self.whole, decision


def of_a_model(*, whole: bool = False, **needs: Any) -> Callable[[type[Words]], type[Words]]:
    """Enters a model with a loss of its own.

    Args:
        whole: whether its table stays whole.
    """

    def enter(kind: type[Words]) -> type[Words]:
        def run(training: Training) -> None:
            predicting = Predicting(training, kind(), whole=whole)
            for step in predicting.steps(3):
                predicting.loss(step).backward()

        run.__name__ = kind.__name__
        scenario(**{"optimizer": None, "fresh": True} | needs)(run)
        return kind

    return enter


@of_a_model()
class class_weights(WithLoss):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, weight=torch.linspace(0.5, 2, NUM_WORDS))


@of_a_model()
class smoothed_labels(WithLoss):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, label_smoothing=0.1)


@of_a_model()
class losses_summed(WithLoss):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, reduction="sum") / 7


@of_a_model()
class losses_weighed_by_position(WithLoss):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(logits, labels, reduction="none")
        return (losses * torch.linspace(0, 1, len(losses))).sum()


@of_a_model()
class sequences_of_a_recurrent_layer(WithLoss):
    """Their memory is laid out by time."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)

    def hidden(self, words_BT: Tensor) -> Tensor:
        found: Tensor = self.rnn(super().hidden(words_BT))[0]
        return found


@of_a_model(whole=True)
class a_z_loss(WithLoss):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels) + 0.1 * logits.logsumexp(-1).square().mean()


@of_a_model()
class a_temperature(WithLoss):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits / 0.5, labels)


@of_a_model(whole=True)
class a_learnt_temperature(WithLoss):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits * self.scale, labels)


@of_a_model(whole=True)
class positions_behind_words(WithLoss):
    def forward(self, words_BT: Tensor, labels_BT: Tensor | None = None) -> Any:
        logits = self.head(self.hidden(words_BT))
        assert labels_BT is not None
        return F.cross_entropy(logits.transpose(1, 2), labels_BT), logits


@of_a_model(whole=True)
class two_losses_of_one_layer(WithLoss):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels) + F.cross_entropy(logits[1:], labels[:-1])


@of_a_model(whole=True)
class two_output_layers_of_one_table(WithLoss):
    """As of models that predict several next words."""

    def forward(self, words_BT: Tensor, labels_BT: Tensor | None = None) -> Any:
        hidden = self.hidden(words_BT)
        assert labels_BT is not None
        losses = [self.loss(self.head(each).flatten(0, 1), labels_BT.flatten()) for each in (hidden, hidden.tanh())]
        return losses[0] + 0.3 * losses[1], hidden


@of_a_model()
class three_modules_of_one_table(WithLoss):
    def __init__(self) -> None:
        super().__init__()
        self.others = nn.Embedding(NUM_WORDS, DIM)
        self.others.weight = self.words.weight

    def hidden(self, words_BT: Tensor) -> Tensor:
        return torch.tanh(self.body(self.words(words_BT) + self.others(words_BT.roll(1, 1))))


@of_a_model()
class a_padded_table(WithLoss):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, DIM, padding_idx=3)
        self.head.weight = self.words.weight


@of_a_model(whole=True)
class a_low_rank_adapter(WithLoss):
    """Applies a low-rank adapter (LoRA) to the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(DIM, 2, bias=False), nn.Linear(2, NUM_WORDS, bias=False)

    def forward(self, words_BT: Tensor, labels_BT: Tensor | None = None) -> Any:
        hidden = self.hidden(words_BT)
        logits = self.head(hidden) + 0.5 * self.up(self.down(hidden))
        assert labels_BT is not None
        return self.loss(logits.flatten(0, 1), labels_BT.flatten()), logits


@of_a_model(whole=True)
class a_low_rank_adapter_of_a_frozen_table(a_low_rank_adapter):
    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)


@of_a_model(whole=True)
class a_frozen_table_with_a_trained_bias(WithLoss):
    def __init__(self) -> None:
        super().__init__()
        self.words.weight.requires_grad_(False)


@of_a_model()
class a_frozen_body(WithLoss):
    """Trains the table, and the bias of its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)


@of_a_model(whole=True)
class normed_rows(WithLoss):
    """A parametrized output layer, of a table of its own."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        parametrizations.weight_norm(self.head)


@of_a_model()
class a_checkpointed_body(WithLoss):
    def hidden(self, words_BT: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().hidden, words_BT, use_reentrant=False)
        return found


@of_a_model(whole=True)
class a_checkpointed_output_layer(WithLoss):
    def forward(self, words_BT: Tensor, labels_BT: Tensor | None = None) -> Any:
        hidden = self.hidden(words_BT)
        assert labels_BT is not None
        scores = checkpoint(
            lambda x: self.loss(self.head(x).flatten(0, 1), labels_BT.flatten()), hidden, use_reentrant=False
        )
        return scores, hidden


@of_a_model()
class banned_words(WithLoss):
    """All words of one rank have logits of minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.head.bias.requires_grad_(False)
        with torch.no_grad():
            self.head.bias[1::2] = -torch.inf

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, torch.where(labels >= 0, labels // 2 * 2, labels))


@of_a_model()
class logits_returned_by_name(WithLoss):
    def forward(self, words_BT: Tensor, labels_BT: Tensor | None = None) -> Any:
        loss, logits = super().forward(words_BT, labels_BT)
        return loss, {"logits": logits}


@of_a_model(whole=True)
class words_picked_from_logits(WithLoss):
    def forward(self, words_BT: Tensor, labels_BT: Tensor | None = None) -> Any:
        loss, logits = super().forward(words_BT, labels_BT)
        return loss, logits[..., :2].detach().clone()


def _without_labels(training: Training, *, guards: bool = False, **options: Any) -> None:
    """A mean over no labels is nan, with gradients of zero.

    Args:
        guards: whether the loop replaces it by zero.
    """
    module = WithLoss()
    model, optimizer = training.wrap(module, **options), training.optimize(AdamW, lr=0.02, eps=1e-3)
    for step in range(5):
        words, labels = draw(training, step)
        if step == 3 or (step == 2 and training.rank == 1):
            labels = labels.fill_(IGNORED)
        loss = model(words, labels)[0]
        training.note(loss.nan_to_num(-1.0))
        (loss.nan_to_num(0.0) if guards else loss).backward()
        optimizer.step()
        optimizer.zero_grad()


@scenario(optimizer=None, fresh=True)
def ranks_without_labels(training: Training) -> None:
    _without_labels(training, strategy={"words.weight": "vocabulary"})


@scenario(optimizer=None, fresh=True)
def ranks_without_labels_of_a_whole_table(training: Training) -> None:
    _without_labels(training, strategy="allreduce", route="graph")


@scenario(optimizer=None, fresh=True)
def ranks_without_labels_that_guard_their_loss(training: Training) -> None:
    _without_labels(training, guards=True, strategy={"words.weight": "vocabulary"})


@scenario(optimizer=None, fresh=True)
def ranks_without_labels_as_written(training: Training) -> None:
    _without_labels(training, route="eager")
