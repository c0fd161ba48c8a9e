"""Gives all ranks rank 0's parameters and buffers before the first call, as DDP's constructor does."""

from __future__ import annotations

from torch import nn

from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.tables.model_state import names_to_ignore
from embrace_fx.setup.options import Options


def send_first_state(model: nn.Module, communicator: Communicator, options: Options) -> None:
    """Sends rank 0's parameters and buffers to every rank. Collective.

    Embeddings, which may be large, are sent later, when the plan says which rank needs which part.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    later = {id(parameter) for layer in layers for parameter in layer.parameters()}
    named = [(name, each.detach()) for name, each in model.named_parameters() if id(each) not in later]
    named += model.named_buffers() if options.broadcast_buffers else ()
    ignored = names_to_ignore(model)
    communicator.broadcast([each for name, each in named if each.device.type != "meta" and name not in ignored])
