"""TorchRec: one EmbeddingCollection of all tables, sharded by columns, by rows or as its planner chooses.

Tables are updated in backward by FBGEMM's fused optimizers, the dense part is DDP's. Its pipelines, which overlap, and
`use_index_dedup`, which sends ids that repeat in a batch once, need CUDA. The planner is told the links' rate and how
many ids a batch has; data-parallel tables are no choice of its, for on a CPU their lookups of sequences add up rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torchrec  # type: ignore[import-not-found]
from torch import Tensor, nn

# The public function only calls this one, and warns that it is deprecated.
from torch.distributed.optim import _apply_optimizer_in_backward as in_backward  # type: ignore[attr-defined]
from torchrec.distributed import DistributedModelParallel  # type: ignore[import-not-found]
from torchrec.distributed.embedding import EmbeddingCollectionSharder  # type: ignore[import-not-found]
from torchrec.distributed.planner import (  # type: ignore[import-not-found]
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.sharding_plan import (  # type: ignore[import-not-found]
    column_wise,
    construct_module_sharding_plan,
    row_wise,
)
from torchrec.distributed.types import ShardingPlan  # type: ignore[import-not-found]
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper  # type: ignore[import-not-found]
from torchrec.optim.optimizers import in_backward_optimizer_filter  # type: ignore[import-not-found]

from benchmarks.models.base import Batch, TableModel
from benchmarks.peers.base import OPTIMIZERS, Task, Training

MBIT_TO_BYTES_PER_MS = 1e6 / 8 / 1e3
PLANNER_CHOICES = ("table_wise", "column_wise", "row_wise")


@dataclass(frozen=True)
class TorchRec:
    """TorchRec. `sharding` is "column", "row" or "planner"."""

    sharding: str

    def prepare(self, task: Task) -> Training:
        plain = task.model()
        # Run one batch to learn which lookups read which table. This does not depend on the batch.
        with torch.no_grad():
            readers = plain.lookups(*task.workload.batch(0, 0, task.seed))
        weights = {name: table.weight.detach() for name, table in plain.embeddings().items()}
        plain.tables = nn.ModuleDict()
        collection = torchrec.EmbeddingCollection(
            tables=[
                torchrec.EmbeddingConfig(
                    name=name,
                    num_embeddings=weight.shape[0],
                    embedding_dim=weight.shape[1],
                    feature_names=[lookup for lookup, (table, _) in readers.items() if table == name],
                )
                for name, weight in weights.items()
            ],
            device=torch.device("meta"),
        )
        in_backward(OPTIMIZERS[task.optimizer], collection.parameters(), task.optimizer_options())
        sharder = EmbeddingCollectionSharder()
        whole = _FromCollection(plain, collection)
        ids_per_lookup = {name: ids.numel() for name, (_, ids) in readers.items()}
        plan = self._plan(whole, sharder, task.rate_mbit, ids_per_lookup)
        model = DistributedModelParallel(whole, device=torch.device("cpu"), plan=plan, sharders=[sharder])
        _load(model, weights)
        dense = KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(model.named_parameters())), task.make_optimizer)
        optimizer = CombinedOptimizer([model.fused_optimizer, dense])

        def steps(batches: Iterable[Batch]) -> Iterator[Tensor]:
            for batch in batches:
                optimizer.zero_grad()
                loss = model(*batch)
                loss.backward()
                optimizer.step()
                yield loss.detach()

        return Training(steps, lambda: str(plan))

    def _plan(self, module: nn.Module, sharder: Any, rate_mbit: float, ids_per_lookup: dict[str, int]) -> Any:
        ranks = dist.get_world_size()
        collection: Any = module.collection
        if self.sharding == "planner":
            topology = Topology(ranks, "cpu", local_world_size=1, inter_host_bw=rate_mbit * MBIT_TO_BYTES_PER_MS)
            constraints = {
                config.name: ParameterConstraints(
                    sharding_types=list(PLANNER_CHOICES),
                    pooling_factors=[float(ids_per_lookup[name]) for name in config.feature_names],
                )
                for config in collection.embedding_configs()
            }
            planner = EmbeddingShardingPlanner(topology, batch_size=1, constraints=constraints, debug=False)
            return planner.collective_plan(module, [sharder], dist.group.WORLD)
        kind = column_wise(ranks=list(range(ranks))) if self.sharding == "column" else row_wise()
        kinds = {config.name: kind for config in collection.embedding_configs()}
        of_collection = construct_module_sharding_plan(collection, kinds, sharder, 1, ranks, "cpu")
        return ShardingPlan({"collection": of_collection})


class _FromCollection(nn.Module):
    """A model that gets its rows from an EmbeddingCollection, for all lookups of a batch at once."""

    def __init__(self, plain: TableModel, collection: nn.Module) -> None:
        super().__init__()
        self.plain = plain
        self.collection = collection

    def forward(self, *batch: Tensor) -> Tensor:
        ids = {name: ids for name, (_, ids) in self.plain.lookups(*batch).items()}
        # Each lookup is one flattened sequence of ids. Its rows are returned in the same order.
        jagged = torchrec.KeyedJaggedTensor(
            keys=list(ids),
            values=torch.cat([each.flatten() for each in ids.values()]),
            lengths=torch.tensor([each.numel() for each in ids.values()]),
        )
        found = self.collection(jagged)
        rows = {name: found[name].values().view(*each.shape, -1) for name, each in ids.items()}
        return self.plain.loss(rows, *batch)


def _load(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copies its part of the whole tables into every shard."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if ".embeddings." not in name:
                continue
            weight = weights[name.rpartition(".embeddings.")[2].removesuffix(".weight")]
            if isinstance(value, Tensor) and not hasattr(value, "local_shards"):
                value.copy_(weight)
                continue
            for shard in value.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                shard.tensor.copy_(weight[row : row + rows, column : column + columns])
