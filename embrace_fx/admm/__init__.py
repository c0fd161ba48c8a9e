"""Training of tanh RNNs without back-propagation, by the alternating direction method of multipliers.

`train(rnn, head, data)` stands where a loop over batches with an optimizer would. It follows P-ADMMiRNN (arXiv
2006.05622): see `lagrangian` for what is minimised, `blocks` for the steps, `sweep` for their order.
"""

from embrace_fx.admm.api import train
from embrace_fx.admm.asynchronous import Asynchronous, LateRank
from embrace_fx.admm.consensus import Synchronous
from embrace_fx.admm.lagrangian import Penalties
from embrace_fx.admm.progress import Progress
from embrace_fx.admm.state import State
from embrace_fx.admm.stopping import Stopping

__all__ = ["Asynchronous", "LateRank", "Penalties", "Progress", "State", "Stopping", "Synchronous", "train"]
