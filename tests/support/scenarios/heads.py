"""What loops do with logits of a table that its output layer shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.checkpoint import checkpoint

from tests.support.scenario import OPTIMIZERS, Training, scenario

NUM_WORDS, DIM = 23, 6
IGNORED = -100
OfLogits = Callable[[Tensor, Tensor], Tensor]


class Words(nn.Module):
    """Predicts words with the table from which it looks up its inputs."""

    def __init__(self, *, tied: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, DIM)
        self.body = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, NUM_WORDS, bias=bias)
        if tied:
            self.head.weight = self.words.weight

    def hidden(self, words_BT: Tensor) -> Tensor:
        return torch.tanh(self.body(self.words(words_BT)))

    def forward(self, words_BT: Tensor, labels_BT: Tensor | None = None) -> Any:
        return self.head(self.hidden(words_BT))


def draw(training: Training, step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(10 * step + training.rank)
    words, labels = torch.randint(NUM_WORDS, (2, 2, 4 + training.rank % 2), generator=random)
    return words, labels.masked_fill(torch.rand(labels.shape, generator=random) < 0.3, IGNORED)


def of_logits(refused: str = "") -> Callable[[OfLogits], OfLogits]:
    """Enters a loss that a loop makes of logits (B, T, V) and labels (B, T)."""

    def enter(function: OfLogits) -> OfLogits:
        def run(training: Training) -> None:
            for step in range(3):
                words, labels = draw(training, step)
                loss = function(training.model(words), labels)
                training.note(loss)
                loss.backward()
                training.step()

        run.__name__ = function.__name__
        scenario(optimizer=OPTIMIZERS["adamw"], refused=refused)(run)
        return function

    return enter


def _flat(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.reshape(-1, logits.size(-1)), labels.reshape(-1)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*_flat(logits, labels))


@of_logits()
def class_weights_in_the_loop(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*_flat(logits, labels), weight=torch.linspace(0.5, 2, NUM_WORDS))


@of_logits()
def smoothed_labels_in_the_loop(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*_flat(logits, labels), reduction="sum", label_smoothing=0.1)


@of_logits()
def next_words(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*_flat(logits[..., :-1, :].contiguous(), labels[..., 1:]), reduction="sum")


@of_logits()
def a_z_loss_in_the_loop(logits: Tensor, labels: Tensor) -> Tensor:
    return _loss(logits, labels) + 0.1 * logits.logsumexp(-1).square().mean()


@of_logits()
def a_temperature_in_the_loop(logits: Tensor, labels: Tensor) -> Tensor:
    return _loss(logits / 2.0, labels)


@of_logits()
def a_temperature_in_place(logits: Tensor, labels: Tensor) -> Tensor:
    return _loss(logits.div_(2.0), labels)


@of_logits()
def words_banned_in_place(logits: Tensor, labels: Tensor) -> Tensor:
    logits[..., 3] = -9.0
    return _loss(logits, labels.masked_fill(labels == 3, IGNORED))


@of_logits()
def a_teacher(logits: Tensor, labels: Tensor) -> Tensor:
    random = torch.Generator().manual_seed(0)
    teacher = torch.randn(NUM_WORDS, generator=random).expand_as(logits).softmax(-1)
    return F.kl_div(F.log_softmax(logits / 2.0, dim=-1), teacher, reduction="batchmean") + _loss(logits, labels)


@of_logits()
def its_own_teacher(logits: Tensor, labels: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(logits, -1), logits.detach().softmax(-1).roll(1, -1), reduction="sum")


@of_logits()
def words_sampled(logits: Tensor, labels: Tensor) -> Tensor:
    policy = Categorical(logits=logits)
    with torch.no_grad():
        chosen = logits.argmax(-1).add(1) % NUM_WORDS
    found: Tensor = -policy.log_prob(chosen).mean() - 0.1 * policy.entropy().mean()
    return found


@of_logits()
def the_best_words(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.topk(3).values.mean() + _loss(logits, labels)


@of_logits()
def log_probabilities_gathered(logits: Tensor, labels: Tensor) -> Tensor:
    return -F.log_softmax(logits, dim=-1).gather(-1, labels.clamp(min=0)[..., None]).mean()


@of_logits()
def weights_of_positions(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(*_flat(logits, labels), reduction="none")
    return (losses * torch.linspace(0, 1, len(losses))).sum() / 3


@of_logits()
def positions_behind_classes(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels)


@of_logits()
def probabilities_for_labels(logits: Tensor, labels: Tensor) -> Tensor:
    wanted = F.one_hot(labels.clamp(min=0), NUM_WORDS).to(logits.dtype)
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1) * 0.9 + 0.1 / NUM_WORDS)


@of_logits()
def another_ignored_label(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*_flat(logits, labels.clamp(min=2)), ignore_index=2, reduction="sum").div(7)


@of_logits()
def scored_positions_chosen(logits: Tensor, labels: Tensor) -> Tensor:
    scored = labels != IGNORED
    return F.cross_entropy(logits[scored], labels[scored], reduction="sum")


@of_logits()
def positions_in_pieces(logits: Tensor, labels: Tensor) -> Tensor:
    pieces = zip(logits.chunk(2, 1), labels.chunk(2, 1), strict=True)
    return sum(
        (F.cross_entropy(part.flatten(0, 1), of.flatten(), reduction="sum") for part, of in pieces), torch.zeros(())
    )


@of_logits()
def examples_one_by_one(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.stack(
        [F.cross_entropy(each, of, reduction="sum") for each, of in zip(logits, labels, strict=True)]
    ).sum()


@of_logits()
def a_loss_of_detached_logits_beside(logits: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        found = _loss(logits, labels)
    return _loss(logits, labels) * (1 + found + _loss(logits.detach(), labels))


@of_logits()
def a_checkpointed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    found: Tensor = checkpoint(_loss, logits, labels, use_reentrant=False)
    return found


@of_logits()
def a_loss_checkpointed_by_reentry(logits: Tensor, labels: Tensor) -> Tensor:
    found: Tensor = checkpoint(_loss, logits, labels, use_reentrant=True)
    return found


@of_logits()
def a_loss_by_names_of_arguments(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(input=logits.flatten(0, 1), target=labels.flatten(), reduction="sum") / 7


@of_logits()
def a_compiled_loss(logits: Tensor, labels: Tensor) -> Tensor:
    found: Tensor = torch.compile(_loss, backend="eager")(logits, labels)
    return found


@of_logits()
def accuracy_beside(logits: Tensor, labels: Tensor) -> Tensor:
    right = (logits.argmax(-1) == labels).double().mean()
    return _loss(logits, labels) * (1 + right)


@of_logits()
def a_factor_that_is_learnt_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    return _loss(logits, labels) * logits.std().detach() + logits.square().mean()


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@of_logits()
def a_function_of_autograd_behind_logits(logits: Tensor, labels: Tensor) -> Tensor:
    doubled: Tensor = _Doubled.apply(logits)  # type: ignore[no-untyped-call]
    return _loss(doubled, labels)


@of_logits()
def gradients_of_logits_hooked(logits: Tensor, labels: Tensor) -> Tensor:
    logits.register_hook(lambda gradient: 0.5 * gradient)
    return _loss(logits, labels)


@of_logits()
def gradients_of_logits_kept(logits: Tensor, labels: Tensor) -> Tensor:
    logits.retain_grad()
    return _loss(logits, labels)


BEFORE_THE_LOSS = "before the loss is computed"


@of_logits(refused=BEFORE_THE_LOSS)
def gradients_of_logits_asked_for(logits: Tensor, labels: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(_loss(logits, labels), logits, retain_graph=True)
    return _loss(logits, labels) + (logits * gradient.detach()).sum()


@of_logits()
def gradients_of_logits_that_were_read_asked_for(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits + 0.0
    (gradient,) = torch.autograd.grad(_loss(logits, labels), logits, retain_graph=True)
    return _loss(logits, labels) + (logits * gradient.detach()).sum()


@of_logits(refused=BEFORE_THE_LOSS)
def gradients_of_logits_hooked_too_late(logits: Tensor, labels: Tensor) -> Tensor:
    loss = _loss(logits, labels)
    logits.register_hook(lambda gradient: 0.5 * gradient)
    return loss


@of_logits(refused="Apply the function to a copy")
def a_function_of_autograd_behind_logits_that_were_written(logits: Tensor, labels: Tensor) -> Tensor:
    logits[..., 0] = 0.5
    doubled: Tensor = _Doubled.apply(logits)  # type: ignore[no-untyped-call]
    return _loss(doubled, labels)


@of_logits()
def a_function_of_autograd_behind_log_softmax(logits: Tensor, labels: Tensor) -> Tensor:
    doubled: Tensor = _Doubled.apply(F.log_softmax(logits, -1))  # type: ignore[no-untyped-call]
    return F.nll_loss(*_flat(doubled, labels)) + _loss(logits, labels)


@of_logits()
def read_under_inference_mode_before_the_loss(logits: Tensor, labels: Tensor) -> Tensor:
    with torch.inference_mode():
        right = (logits.argmax(-1) == labels).double().mean()
    return _loss(logits, labels) * (1 + right.clone())


@of_logits()
def mapped_losses(logits: Tensor, labels: Tensor) -> Tensor:
    each = torch.func.vmap(lambda row, of: F.cross_entropy(row, of, reduction="sum"))
    found: Tensor = each(logits, labels)
    return found.sum()


@of_logits()
def gradients_of_a_function_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    of_loss = torch.func.grad(lambda values: F.cross_entropy(values, labels.flatten()))
    gradient: Tensor = of_loss(logits.detach().flatten(0, 1))
    return (logits.flatten(0, 1) * gradient).sum() + _loss(logits, labels)


@of_logits()
def reversed_in_numpy(logits: Tensor, labels: Tensor) -> Tensor:
    return _loss(logits, labels) * float(logits.detach().cpu().numpy().std())


@of_logits()
def margins_of_labels(logits: Tensor, labels: Tensor) -> Tensor:
    return F.multi_margin_loss(*_flat(logits, labels.clamp(min=0))) + F.mse_loss(
        logits, torch.zeros(()).expand_as(logits)
    )


@of_logits()
def columns_left_out(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :-3].flatten(0, 1), labels.flatten().clamp(max=NUM_WORDS - 4))


@of_logits()
def scores_of_two_words(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, -1, [3, 5]], labels[:, 0].remainder(2).abs())


@of_logits()
def joined_by_einsum(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.einsum("btv,btw->vw", logits, logits.softmax(-1)).square().mean()


@of_logits()
def a_loss_written_by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits - logits.amax(-1, keepdim=True).detach()
    chosen = labels.clamp(min=0)[..., None]
    return (logits.exp().sum(-1).log() - logits.gather(-1, chosen)[..., 0]).mean()


@of_logits()
def losses_that_are_not_needed(logits: Tensor, labels: Tensor) -> Tensor:
    _loss(logits, labels)
    return 0.0 * _loss(logits, labels) + logits.new_ones(()) * _loss(logits[:, 1:], labels[:, 1:])
