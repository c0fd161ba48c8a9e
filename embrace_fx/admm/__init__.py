"""Training of tanh RNNs by the alternating direction method of multipliers, without a learning rate.

`train(rnn, head, data)` replaces a loop over batches with an optimizer. It is based on P-ADMMiRNN (arXiv 2006.05622):
`lagrangian` has the minimized function, `states` and `weights` the updates, and `update` their order.
"""

from embrace_fx.admm.asynchronous import Asynchronous, LateRank
from embrace_fx.admm.consensus import Synchronous
from embrace_fx.admm.lagrangian import Penalties
from embrace_fx.admm.progress import Progress, Stopping
from embrace_fx.admm.state import State
from embrace_fx.admm.training import train

__all__ = ["Asynchronous", "LateRank", "Penalties", "Progress", "State", "Stopping", "Synchronous", "train"]
