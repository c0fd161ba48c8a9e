"""Models with an output layer over a table, of every kind, and what loops do with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from tests.support.scenario import Training, scenario
from tests.support.scenarios.heads import DIM, IGNORED, NUM_WORDS, Words, draw


class WithLoss(Words):
    """Returns the loss and the logits, where it has labels."""

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
        """Logits and labels."""
        words, labels = draw(self.training, step)
        return self.model(words), labels

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

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
            for step in range(3):
                predicting.loss(step).backward()
                predicting.step()
            predicting.check()

        run.__name__ = kind.__name__
        scenario(**{"optimizer": None, "fresh": True} | needs)(run)
        return kind

    return enter


Loop = Callable[[Training], None]


def loop(**needs: Any) -> Callable[[Loop], Loop]:
    """Enters a loop with models of its own."""
    return scenario(**{"optimizer": None, "fresh": True} | needs)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# -- losses inside of the model ----------------------------------------------------------------------------------------


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
    """As LoRA has it, on the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(DIM, 2, bias=False), nn.Linear(2, NUM_WORDS, bias=False)

    def forward(self, words_BT: Tensor, labels_BT: Tensor | None = None) -> Any:
        hidden = self.hidden(words_BT)
        logits = self.head(hidden) + 0.5 * self.up(self.down(hidden))
        assert labels_BT is not None
        return self.loss(logits.flatten(0, 1), labels_BT.flatten()), logits


@of_a_model(whole=True)
class a_low_rank_adapter_of_a_frozen_table(WithLoss):
    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)
        self.down, self.up = nn.Linear(DIM, 2, bias=False), nn.Linear(2, NUM_WORDS, bias=False)

    def forward(self, words_BT: Tensor, labels_BT: Tensor | None = None) -> Any:
        hidden = self.hidden(words_BT)
        logits = self.head(hidden) + 0.5 * self.up(self.down(hidden))
        assert labels_BT is not None
        return self.loss(logits.flatten(0, 1), labels_BT.flatten()), logits


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


# -- loops -------------------------------------------------------------------------------------------------------------


@loop(refused="one backward for each call")
def two_backwards_of_one_loss(training: Training) -> None:
    predicting = Predicting(training, Words())
    for step in range(3):
        logits, labels = predicting.logits(step)
        loss = _loss(logits, labels)
        loss.backward(retain_graph=True)
        if step:
            (0.5 * loss).backward()
        predicting.step()
    predicting.check()


@loop()
def losses_of_two_calls(training: Training) -> None:
    """As preferences are learnt from chosen and rejected answers."""
    predicting = Predicting(training, Words())
    for step in range(3):
        (better, labels), (worse, of) = predicting.logits(step), predicting.logits(step + 10)
        loss = F.softplus(_loss(better, labels) - _loss(worse, of)) + 0.1 * better.square().mean()
        training.note(loss)
        loss.backward()
        predicting.step()
    predicting.check()


@loop()
def accumulated_reads(training: Training) -> None:
    predicting = Predicting(training, Words(bias=False))
    for step in range(3):
        with predicting.model.no_sync():
            for k in (10, 20):
                logits, labels = predicting.logits(step + k)
                (_loss(logits, labels) + 0.1 * logits.square().mean()).backward()
        logits, labels = predicting.logits(step)
        (_loss(logits, labels) + 0.1 * logits.square().mean()).backward()
        predicting.step()
    predicting.check()


@loop()
def accumulated_losses(training: Training) -> None:
    predicting = Predicting(training, Words())
    for step in range(3):
        with predicting.model.no_sync():
            _loss(*predicting.logits(step + 10)).backward()
        _loss(*predicting.logits(step + 20)).backward()
        _loss(*predicting.logits(step)).backward()
        predicting.step()
    predicting.check()


@loop(refused="logits must be read before optimizer.step()")
def logits_of_the_last_step(training: Training) -> None:
    predicting = Predicting(training, Words())
    before = None
    for step in range(3):
        logits, labels = predicting.logits(step)
        loss = _loss(logits, labels)
        if before is not None:
            loss = loss + (before.mean() - logits.mean()).square()
        loss.backward()
        predicting.step()
        before = logits.detach()


@loop()
def logits_of_the_last_step_that_were_copied(training: Training) -> None:
    predicting = Predicting(training, Words())
    before = torch.zeros(())
    for step in range(3):
        logits, labels = predicting.logits(step)
        loss = _loss(logits, labels) + (before - logits.mean()).square()
        before = logits.detach().mean()
        training.note(loss)
        loss.backward()
        predicting.step()
    predicting.check()


@loop(refused="logits must be read before optimizer.step()")
def data_written_before_the_loss(training: Training) -> None:
    predicting = Predicting(training, Words())
    for step in range(3):
        logits, labels = predicting.logits(step)
        predicting.module.words.weight.data.mul_(0.9)
        _loss(logits, labels).backward()
        predicting.step()


@loop()
def data_written_between_steps(training: Training) -> None:
    predicting = Predicting(training, Words())
    for step in range(3):
        _loss(*predicting.logits(step)).backward()
        predicting.step()
        predicting.module.words.weight.data.clamp_(-0.5, 0.5)
        with torch.no_grad():
            predicting.module.words.weight[2] = 0.25
    predicting.check()


@loop()
def evaluated_with_labels(training: Training) -> None:
    predicting = Predicting(training, WithLoss())
    for step in range(3):
        predicting.loss(step).backward()
        predicting.step()
        predicting.model.eval()
        with torch.no_grad():
            predicting.loss(step + 10)
            logits, labels = predicting.logits(step + 20)
            training.note(logits.argmax(-1), _loss(logits, labels))
        predicting.loss(step + 30)
        predicting.model.train()
        with torch.no_grad():
            predicting.loss(step + 40)
    predicting.check()


@loop()
def calls_with_and_without_labels(training: Training) -> None:
    predicting = Predicting(training, WithLoss())
    for step in range(4):
        loss = predicting.loss(step) if step % 2 else _loss(*predicting.logits(step))
        loss.backward()
        predicting.step()
    predicting.check()


@loop()
def a_frozen_body_and_a_loss_of_the_loop(training: Training) -> None:
    module = Words(tied=False)
    module.requires_grad_(False)
    module.head.requires_grad_(True)
    predicting = Predicting(training, module, table="head.weight")
    for step in range(3):
        loss = _loss(*predicting.logits(step))
        training.note(loss)
        loss.backward()
        predicting.step()
    predicting.check()


@loop(reference=partial(DistributedDataParallel, find_unused_parameters=True))
def a_table_frozen_later(training: Training) -> None:
    predicting = Predicting(training, WithLoss())
    for step in range(4):
        predicting.module.words.weight.requires_grad_(step < 2)
        predicting.loss(step).backward()
        predicting.step()


class TwoTables(nn.Module):
    """Two output layers, each over the table of its own words."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = WithLoss(), WithLoss()

    def forward(self, words_BT: Tensor, labels_BT: Tensor) -> Any:
        (a, _), (b, _) = self.a(words_BT, labels_BT), self.b(words_BT.flip(1), labels_BT)
        return a, b


@loop(reference=partial(DistributedDataParallel, find_unused_parameters=True))
def losses_of_two_output_layers(training: Training) -> None:
    module = TwoTables()
    model = training.wrap(module, strategy={"*words.weight": "vocabulary"})
    optimizer = training.optimize(AdamW, module.parameters(), lr=0.02, eps=1e-3)
    for step in range(4):
        a, b = model(*draw(training, step))
        loss = a + 0.3 * b if step != 2 else a
        training.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class MayPredict(WithLoss):
    """Rates sentences, too; the words of some are predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Linear(DIM, 1)

    def forward(self, words_BT: Tensor, labels_BT: Tensor | None = None) -> Any:
        hidden = self.hidden(words_BT)
        rated = self.rates(hidden).square().mean()
        return (rated,) if labels_BT is None else (rated + super().forward(words_BT, labels_BT)[0],)


@loop(reference=partial(DistributedDataParallel, find_unused_parameters=True))
def output_layers_of_some_steps(training: Training) -> None:
    predicting = Predicting(training, MayPredict())
    for step in range(4):
        words, labels = draw(training, step)
        (loss,) = predicting.model(words, labels) if step % 2 else predicting.model(words)
        loss.backward()
        predicting.step()


@loop()
def an_empty_batch(training: Training) -> None:
    predicting = Predicting(training, Words())
    for step in range(3):
        words, labels = draw(training, step)
        kept = 0 if step == 1 and training.rank == 1 else 2
        logits = predicting.model(words[:kept])
        loss = F.cross_entropy(logits.reshape(-1, NUM_WORDS), labels[:kept].reshape(-1), reduction="sum") / 5
        training.note(loss)
        loss.backward()
        predicting.step()
    predicting.check()


@loop()
def activations_hooked(training: Training) -> None:
    seen: list[Tensor] = []
    module = Words()
    module.head.register_forward_hook(lambda *args: seen.append(args[2].detach().mean()))
    predicting = Predicting(training, module)
    for step in range(3):
        _loss(*predicting.logits(step)).backward()
        predicting.step()
    training.note(*seen)


@loop()
def tied_anew_between_steps(training: Training) -> None:
    """The output layer gets a table of its own, which starts where the words are."""
    module = WithLoss()
    for first in (0, 2):
        predicting = Predicting(training, module)
        for step in range(first, first + 2):
            predicting.loss(step).backward()
            predicting.step()
        whole: Any = predicting.model.whole() if training.is_compiled else contextlib.nullcontext(module)
        with whole as plain:
            state: Mapping[str, Tensor] = {name: each.detach().clone() for name, each in plain.state_dict().items()}
        module = WithLoss(tied=first == 2)
        module.load_state_dict(state)
