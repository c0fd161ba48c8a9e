"""Shards the output layer over a sharded table. Ranks send hidden states of positions with a label, instead of logits
(Megatron-LM's vocabulary-parallel cross entropy, over data-parallel ranks as in Partial FC, CVPR 2022).

Contract
    For each table of `tables`: its rows are dealt out over the ranks, each of which computes its columns of the logits
    of all ranks' scored positions. The loss and every gradient are unchanged; the table's dense gradient is complete
    where its rows are, and is the mean over ranks. The gradient of a bias is this rank's share: the sum over ranks, N
    times the mean, has all of it. A result that is logits becomes the hidden states that it is made of when it is read,
    and its tangent that of these.

    Hidden states, statistics and hidden gradients travel in chunks of every rank's positions: those of the next chunk
    are on their way while one is computed.

    rewrite, M positions, labels (M,), V x D table, one chunk:
        logits = aten.mm(hidden, aten.t(weight))
        loss, count = aten.nll_loss_forward(aten._log_softmax(logits, 1, False), labels, None, 1, -100)
        ...
        g = aten._log_softmax_backward_data(aten.nll_loss_backward(tangent, ...), ...) + tangent_of_logits
        grad_hidden = aten.mm(g, weight); dense = aten.mm(aten.t(g), hidden)
        return (loss, logits, ..., dense + embedding_dense_backward(...))        # Gradient(weight)
    ->
        positions, scored = embrace.scored_positions(labels, -100, V)
        counts = wait(embrace.gather_counts(scored, "weight", "embedding", N))
        all_labels = wait(embrace.gather_positions(scored, counts, 0, 1, ...))   # P
        all_hidden = wait(embrace.gather_positions(aten.index_select(hidden, 0, positions), counts, 0, 1, ...))
        part = aten.mm(all_hidden, aten.t(weight_shard))                         # P x V'
        of_rank = embrace.head_statistics(part, all_labels, False, "", rank, N)  # P x 3
        statistics = wait(embrace.scatter_positions(of_rank, counts, 0, 1, ...))
        loss, _, log_sums = embrace.head_loss([statistics], positions, labels, None, 1, N)
        ...
        own = embrace.head_coefficients(tangent, None, log_sums, positions, labels, None, 1, V)
        g = embrace.head_gradient(part, all_labels, wait(embrace.gather_positions(own, counts, 0, 1, ...)), "", rank, N)
        parts = wait(embrace.scatter_positions(aten.mm(g, weight_shard), counts, 0, 1, ...))
        dense = aten.mm(aten.t(g), all_hidden * (1 / N))                         # V' x D; of the next chunks, `addmm`
        grad_hidden = embrace.spread_positions([parts], positions, hidden, N) + tangent_of_hidden
        return (loss, hidden, ..., embedding_dense_backward(...), dense)         # Gradient(weight), of its shard
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from embrace_fx.passes.heads import VIEWS, Head, Loss, find_head, labels_from_batch, parameter_read
from embrace_fx.passes.rewriter import Rewriter, move_to_head
from embrace_fx.passes.tables import find_tables
from embrace_fx.vocabulary.graph import (
    Gradient,
    GradientOfShard,
    OutputRole,
    Parameter,
    Result,
    Shard,
    Tangent,
    TrainingGraph,
    parameters_of,
    set_outputs,
)
from embrace_fx.vocabulary.head import HeadPlan, PromisedLogits, Step, steps_to_text
from embrace_fx.vocabulary.operation_id import HeadPart, head_id
from embrace_fx.vocabulary.ops import argument
from embrace_fx.vocabulary.plan import Grid
from embrace_fx.vocabulary.sizes import ExpectedSizes

aten = torch.ops.aten
embrace = torch.ops.embrace


@dataclass(frozen=True)
class ShardHeads:
    """Graph pass that shards output layers whose weight is a sharded table. Each rank computes the logits of its own
    rows of the table, for the positions of all ranks.

    Attributes:
        tables: name of the table's parameter -> how its output layer is sharded; in the same order on all ranks.
        rank, world_size: this rank and the number of ranks, which determine this rank's rows.
        keeps_logits: whether a loss outside of the model may keep its logits for the backward (`PromisedLogits`).
    """

    tables: Mapping[str, HeadPlan]
    rank: int
    world_size: int
    keeps_logits: bool = True

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        read = parameters_of(graph.module)
        dense = {table.parameter for table in graph.tables if table.use == "sparse"}
        tables = [name for name in self.tables if name in read and name not in dense]
        if not tables:
            return graph
        result = graph.edit()
        promised, sizes = dict(result.promised), dict(result.expected.by_symbol)
        for name in tables:
            sharding = _HeadSharding(result, find_head(result, name), self)
            promised |= sharding.rewrite()
            sizes |= sharding.sizes
        result.graph.eliminate_dead_code()
        return replace(result, tables=find_tables(result), promised=promised, expected=ExpectedSizes(sizes))


@dataclass(frozen=True)
class _Scored:
    """Graph nodes for the S positions of this rank that have a label.

    Attributes:
        positions: (S,), indices of the positions in the labels.
        rows: (S,), indices of the positions in the hidden states.
        counts: (N,), how many such positions each of the N ranks has.
        chunks: the chunks in which all ranks' positions are exchanged, in order.
        log_sums: (S,), the log-sum-exp of the logits at each position.
    """

    positions: fx.Node
    rows: fx.Node
    counts: fx.Node
    chunks: Sequence[_Chunk]
    log_sums: fx.Node


@dataclass(frozen=True)
class _Chunk:
    """Graph nodes for one chunk of the labelled positions of all ranks, P in number.

    Attributes:
        labels: the labels (P,).
        hidden: the hidden states (P, D).
        logits: the logits (P, V') of this rank's V' rows of the table.
    """

    labels: fx.Node
    hidden: fx.Node
    logits: fx.Node


class _HeadSharding:
    """Rewrites a graph so that one output layer uses this rank's shard of the table.

    Attributes:
        sizes: symbol of a data-dependent size -> its expected value.
    """

    def __init__(self, graph: TrainingGraph, head: Head, options: ShardHeads) -> None:
        self._graph, self._head, self._options = graph, head, options
        self._rewriter = Rewriter(graph.module)
        self._table = str(head.weight.meta["role"].name)
        plan = options.tables[self._table]
        self._chunks = plan.chunks
        self._name = self._table.removesuffix(".weight")
        self._weight = head.weight.meta["val"]
        self._shard = self._insert_shard()
        self._shown: dict[fx.Node, fx.Node] = {head.product: head.hidden}
        self._own = round(graph.expected.number(head.hidden.meta["val"].shape[0]) * plan.scored)
        self.sizes: dict[str, int] = {}

    def rewrite(self) -> dict[int, PromisedLogits]:
        """Rewrites the output layer in place. Returns, for each result of the model that is logits, by its index, how
        the runtime computes the logits when they are read.
        """
        head, loss = self._head, self._head.loss
        for size in head.sizes:
            size.replace_input_with(size.all_input_nodes[0], self._flatten_positions(size.all_input_nodes[0]))
        of_hidden = list[fx.Node]()
        of_weight: fx.Node | None = None
        if loss is not None:
            scored = self._insert_loss(loss)
            if loss.backward is not None:
                of_hidden, of_weight = self._insert_gradients(loss, loss.backward, scored)
        hidden = {made.index: self._flatten_positions(made.node) for made in head.results}
        self._replace_hidden_gradient([*of_hidden, *self._replace_tangents(hidden)])
        outputs = [
            (hidden.get(role.index, value) if isinstance(role, Result) else value, role)
            for value, role in self._graph.outputs()
        ]
        if head.of_bias is not None and (loss is None or loss.backward is None):
            with self._rewriter.before(head.of_bias):  # zeros: a loss outside of the model computes this gradient
                like = head.of_bias.meta["val"]
                none = self._call(
                    aten.zeros.default, list(like.shape), dtype=like.dtype, device=like.device, name="none"
                )
            head.of_bias.replace_all_uses_with(none)
        if head.of_table is not None:
            outputs = self._remove_term(head.of_table, outputs)
        if of_weight is not None:
            outputs.append((of_weight, GradientOfShard(self._table)))
        set_outputs(self._graph.module, outputs)
        return {made.index: self._make_promise(made.steps) for made in head.results}

    def _call(self, target: Any, *args: Any, name: str, **options: Any) -> fx.Node:
        """Inserts a call of the op `target`, and returns its node, named after the output layer and `name`."""
        return self._rewriter.call(target, *args, name=f"{self._name}_{name}", **options)

    def _launch(self, target: Any, *args: Any, part: HeadPart, name: str, chunk: int = 0, chunks: int = 1) -> fx.Node:
        """Inserts a call of the op `target`, which launches an exchange between all ranks. Returns its node.

        Args:
            part: what is exchanged, such as "labels", for the launch's id.
            chunk, chunks: the index of the exchanged chunk of positions, and the number of chunks.
        """
        table, ranks = self._table, self._options.world_size
        launch = self._rewriter.launch(
            target, *args, table, "embedding", ranks, launch=head_id(table, part, chunk), name=f"{self._name}_{name}"
        )
        self._expect(launch, ranks * self._own // chunks)
        return launch

    def _numbered(self, name: str, chunk: int) -> str:
        """Returns a node name, with the chunk's number appended if there are several chunks."""
        return name if self._chunks == 1 else f"{name}_{chunk}"

    def _launch_chunk(self, target: Any, rows: fx.Node, counts: fx.Node, chunk: int, part: HeadPart) -> fx.Node:
        """Inserts a call of the op `target`, which exchanges one chunk of `rows`, one row per position, between all
        ranks. Returns its node. `part` names what the rows are, such as "hidden states".
        """
        name, of = self._numbered(part.replace(" ", "_"), chunk), {"chunk": chunk, "chunks": self._chunks}
        return self._launch(target, rows, counts, chunk, self._chunks, part=part, name=name, **of)

    def _launch_whole(self, rows: fx.Node, counts: fx.Node, part: HeadPart) -> fx.Node:
        """Inserts one launch that gathers all `rows` of all ranks, and returns its node. `part` names what they are."""
        return self._launch(embrace.gather_positions.default, rows, counts, 0, 1, part=part, name=f"all_{part}")

    def _take_chunk(self, rows: fx.Node, counts: fx.Node, chunk: int, name: str) -> fx.Node:
        """Returns a node with one chunk of the gathered `rows`, or `rows` itself if there is only one chunk."""
        if self._chunks == 1:
            return rows
        target = embrace.chunk_of_positions.default
        found = self._call(target, rows, counts, chunk, self._chunks, name=self._numbered(name, chunk))
        self._expect(found, self._options.world_size * self._own // self._chunks)
        return found

    def _expect(self, node: fx.Node, count: int) -> None:
        """Records `count` as the expected size of the first dimension of a node's result, if that size is symbolic."""
        if not isinstance(size := node.meta["val"].shape[0], int):
            self.sizes[str(size.node.expr)] = count

    def _insert_shard(self) -> fx.Node:
        """Inserts a placeholder for this rank's shard of the weight, and returns it."""
        options, weight = self._options, self._head.weight
        own = Grid(options.world_size, 1).own_rows(self._weight.shape[0], options.rank)
        shape = (len(range(self._weight.shape[0])[own]), self._weight.shape[1])
        with self._rewriter.before(weight):
            name, like = f"{weight.name}_shard", self._weight
            return self._rewriter.placeholder(name, Shard(self._table), shape, like.dtype, like.device)

    # -- the forward ---------------------------------------------------------------------------------------------------

    def _insert_loss(self, loss: Loss) -> _Scored:
        """Replaces the loss by a loss over sharded logits. Returns the nodes that the backward of the loss reads."""
        head, node, rewriter, options = self._head, loss.node, self._rewriter, self._options
        labels, reduction = argument(node, "target"), argument(node, "reduction")
        with rewriter.before(move_to_head([labels]) if labels_from_batch(loss) else node):
            ignored = argument(node, "ignore_index")
            found = self._call(
                embrace.scored_positions.default, labels, ignored, self._weight.shape[0], name="scored_positions"
            )
            positions = rewriter.item(found, 0, f"{self._name}_positions")
            own_labels = rewriter.item(found, 1, f"{self._name}_own_labels")
            self._expect(positions, self._own)
            counting = self._launch(embrace.gather_counts.default, own_labels, part="counts", name="counts")
        with rewriter.before(node):
            rows = self._hidden_rows(positions, loss.shapes)
            counts = rewriter.wait(counting)
            own = self._call(aten.index_select.default, head.hidden, 0, rows, name="own_hidden")
            labelling = self._launch_whole(own_labels, counts, "labels")
            gather, every = embrace.gather_positions.default, range(self._chunks)
            gathering = [self._launch_chunk(gather, own, counts, chunk, "hidden states") for chunk in every]
            all_labels = rewriter.wait(labelling)
            computed = [
                self._insert_chunk_logits(chunk, all_labels, counts, each, loss) for chunk, each in enumerate(gathering)
            ]
            statistics = [rewriter.wait(launch) for _, launch in computed]
            weight, ranks = argument(node, "weight"), options.world_size
            made = self._call(
                embrace.head_loss.default, statistics, positions, labels, weight, reduction, ranks, name="loss"
            )
            items = [
                rewriter.item(made, k, f"{self._name}_{each}") for k, each in enumerate(("nll", "count", "log_sums"))
            ]
            value = self._cast_to(items[0], node.meta["val"][0].dtype)
            if loss.sums is not None:
                smoothing, rows_of_table = embrace.head_smoothing.default, self._weight.shape[0]
                like = self._flatten_positions(loss.sums.all_input_nodes[0])
                sums = self._call(
                    smoothing, statistics, items[2], positions, like, rows_of_table, ranks, name="smoothing"
                )
                loss.sums.replace_all_uses_with(self._cast_to(sums, loss.sums.meta["val"].dtype))
        for item in list(node.users):
            item.replace_all_uses_with(value if item.args[1] == 0 else items[1])
        return _Scored(positions, rows, counts, [chunk for chunk, _ in computed], items[2])

    def _insert_chunk_logits(
        self, chunk_number: int, all_labels: fx.Node, counts: fx.Node, gathering: fx.Node, loss: Loss
    ) -> tuple[_Chunk, fx.Node]:
        """Inserts the ops that compute this rank's logits of one chunk of positions. Returns the chunk, and the node
        that launches the exchange of its softmax statistics. `all_labels` are the labels of all ranks' positions, and
        `counts` are the numbers of positions of each rank. The node `gathering` launches the exchange of the chunk's
        hidden states.
        """
        labels = self._take_chunk(all_labels, counts, chunk_number, "chunk_labels")
        hidden = self._rewriter.wait(gathering)
        logits = self._insert_logits(hidden, chunk_number)
        how = steps_to_text(loss.steps), self._options.rank, self._options.world_size
        name = self._numbered("statistics_of_rank", chunk_number)
        smooths = loss.sums is not None
        of_rank = self._call(embrace.head_statistics.default, logits, labels, smooths, *how, name=name)
        launch = self._launch_chunk(embrace.scatter_positions.default, of_rank, counts, chunk_number, "statistics")
        return _Chunk(labels, hidden, logits), launch

    def _hidden_rows(self, positions: fx.Node, shapes: Sequence[fx.Node]) -> fx.Node:
        """Converts `positions`, which are indices in the labels, to indices in the hidden states. Returns the node of
        the result. `shapes` are the ops on the logits that change their leading dimensions before the loss.
        """
        if all(shape.target is not aten.slice.Tensor for shape in shapes):
            return positions
        hidden = self._head.hidden
        count = self._call(aten.sym_size.int, hidden, 0, name="positions_count")
        device = hidden.meta["val"].device
        every = self._call(aten.arange.default, count, dtype=torch.int64, device=device, name="every_position")
        for shape in shapes:
            every = self._reshape_like(every, shape, ())
        return self._call(aten.index_select.default, every, 0, positions, name="rows_of_positions")

    def _reshape_like(self, value: fx.Node, like: fx.Node, last: tuple[int, ...]) -> fx.Node:
        """Applies the slice or reshape `like` of the logits' leading dimensions to `value`, whose rows have the shape
        `last`: (D,) for hidden states, () for one number per position. Returns the new node.
        """
        if like.target is aten.slice.Tensor:
            return self._call(aten.slice.Tensor, value, *like.args[1:], name=f"{like.name}_of_hidden")
        size: Any = like.args[1]
        return self._call(aten.reshape.default, value, [*size[:-1], *last], name=f"{like.name}_of_hidden")

    def _insert_logits(self, hidden: fx.Node, chunk: int) -> fx.Node:
        """Inserts a chunk's logits (P, V') for this rank's rows of the table, before steps such as a softcap."""
        head, options, name = self._head, self._options, self._numbered("logits", chunk)
        transposed = self._call(aten.t.default, self._read_shard(), name="shard_transposed")
        if head.bias is None:
            return self._call(aten.mm.default, hidden, transposed, name=name)
        every = self._weight.shape[0]
        bias = self._call(aten.slice.Tensor, head.bias, 0, options.rank, every, options.world_size, name="own_bias")
        return self._call(aten.addmm.default, bias, hidden, transposed, name=name)

    def _read_shard(self) -> fx.Node:
        """Returns this rank's shard of the weight, cast to the dtype in which the model reads the weight."""
        return self._cast_to(self._shard, self._head.as_read.meta["val"].dtype)

    def _cast_to(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Returns `node` if it has this dtype, otherwise an inserted cast of it."""
        return node if node.meta["val"].dtype == dtype else self._rewriter.cast(node, dtype, f"{node.name}_cast")

    # -- the backward --------------------------------------------------------------------------------------------------

    def _insert_gradients(self, loss: Loss, backward: fx.Node, scored: _Scored) -> tuple[list[fx.Node], fx.Node | None]:
        """Inserts the gradients of the loss, whose backward node is `backward`. Returns ([the gradient of the hidden
        states] or [] if nothing needs it, the gradient of the shard or None).
        """
        head, options, rewriter = self._head, self._options, self._rewriter
        follows = loss.of_sums is not None and backward < loss.of_sums
        with rewriter.before(loss.of_sums.next if follows else backward):  # type: ignore[union-attr]
            given, reduction = argument(backward, "grad_output"), argument(backward, "reduction")
            own = self._call(
                embrace.head_coefficients.default,
                given,
                loss.of_sums,
                scored.log_sums,
                scored.positions,
                argument(backward, "target"),
                argument(backward, "weight"),
                reduction,
                self._weight.shape[0],
                name="coefficients",
            )
            everyone = rewriter.wait(self._launch_whole(own, scored.counts, "coefficients"))
            sending, of_weight, of_bias = list[fx.Node](), None, None
            for number, chunk in enumerate(scored.chunks):
                gradient = self._insert_logits_gradient(number, chunk, scored.counts, everyone, loss)
                if head.of_hidden is not None:
                    name = self._numbered("hidden_gradient_of_rank", number)
                    product = self._call(aten.mm.default, gradient, self._read_shard(), name=name)
                    scatter = embrace.scatter_positions.default
                    sending.append(self._launch_chunk(scatter, product, scored.counts, number, "hidden gradients"))
                if head.of_weight is not None:
                    of_weight = self._accumulate_table_gradient(of_weight, gradient, chunk.hidden)
                if head.of_bias is not None:
                    own = self._call(aten.sum.dim_IntList, gradient, [0], name="own_bias_gradient")
                    of_bias = own if of_bias is None else self._call(aten.add.Tensor, of_bias, own, name="own_bias_sum")
            if of_weight is not None:
                of_weight = self._cast_to(of_weight, self._weight.dtype)
            if head.of_bias is not None and of_bias is not None:
                self._replace_bias_gradient(head.of_bias, of_bias)
            of_hidden = []
            if head.of_hidden is not None:
                arrived = [rewriter.wait(launch) for launch in sending]
                spread = embrace.spread_positions.default
                of_hidden.append(
                    self._call(spread, arrived, scored.rows, head.hidden, options.world_size, name="hidden_gradient")
                )
        return of_hidden, of_weight

    def _insert_logits_gradient(
        self, number: int, chunk: _Chunk, counts: fx.Node, everyone: fx.Node, loss: Loss
    ) -> fx.Node:
        """Inserts the gradient of one chunk's logits, for this rank's rows of the table. Returns its node.

        Args:
            everyone: the coefficients of each position's gradient, gathered from all ranks.
        """
        coefficients = self._take_chunk(everyone, counts, number, "chunk_coefficients")
        how = steps_to_text(loss.steps), self._options.rank, self._options.world_size
        name = self._numbered("logits_gradient", number)
        return self._call(embrace.head_gradient.default, chunk.logits, chunk.labels, coefficients, *how, name=name)

    def _accumulate_table_gradient(self, partial_sum: fx.Node | None, gradient: fx.Node, hidden: fx.Node) -> fx.Node:
        """Adds one chunk's share of the mean gradient of this rank's rows (V', D), and returns the sum.

        Args:
            partial_sum: the sum over previous chunks, or None for the first.
            gradient: the gradient of the chunk's logits.
            hidden: the chunk's hidden states.
        """
        mean = self._call(aten.mul.Tensor, hidden, 1.0 / self._options.world_size, name="hidden_share")
        turned = self._call(aten.t.default, gradient, name="logits_gradient_transposed")
        if partial_sum is None:
            return self._call(aten.mm.default, turned, mean, name="shard_gradient")
        return self._call(aten.addmm.default, partial_sum, turned, mean, name="shard_gradient")

    def _replace_bias_gradient(self, node: fx.Node, own: fx.Node) -> None:
        """Replaces the bias's gradient, `node`, by `own` for this rank's rows and by zero for all other rows."""
        options, every = self._options, self._weight.shape[0]
        share = self._call(
            aten.slice_backward.default, own, [every], 0, options.rank, every, options.world_size, name="bias_gradient"
        )
        shape = list(node.meta["val"].shape)
        node.replace_all_uses_with(self._call(aten.view.default, share, shape, name="bias_gradient_as_was"))

    # -- results -------------------------------------------------------------------------------------------------------

    def _flatten_positions(self, node: fx.Node) -> fx.Node:
        """Returns the hidden states from which the logits `node` are computed, with the logits' leading dimensions."""
        if node not in self._shown:
            source = self._flatten_positions(node.all_input_nodes[0])
            reshapes = node.target in (*VIEWS, aten.slice.Tensor)
            with self._rewriter.before(node):
                self._shown[node] = self._reshape_like(source, node, (self._weight.shape[1],)) if reshapes else source
        return self._shown[node]

    def _replace_tangents(self, hidden: Mapping[int, fx.Node]) -> list[fx.Node]:
        """Replaces tangents of logits by tangents of their hidden states (`hidden`, by index of the result). Returns
        the new tangents as matrices (positions, D).
        """
        found = []
        for node, role in list(self._graph.inputs()):
            if not isinstance(role, Tangent) or role.index not in hidden:
                continue
            with self._rewriter.fake_mode:
                node.meta["val"] = torch.empty_like(hidden[role.index].meta["val"])
            if self._head.of_hidden is not None:
                size = [-1, self._weight.shape[1]]
                with self._rewriter.before(self._head.of_hidden):
                    found.append(self._call(aten.view.default, node, size, name=f"{node.name}_of_hidden"))
        return found

    def _replace_hidden_gradient(self, terms: Sequence[fx.Node]) -> None:
        """Replaces the gradient of the hidden states with the sum of `terms`."""
        before = self._head.of_hidden
        if before is None:
            return
        with self._rewriter.before(before):
            first, *others = [self._cast_to(term, before.meta["val"].dtype) for term in terms]
            for term in others:
                first = self._call(aten.add.Tensor, first, term, name="hidden_gradient_sum")
        before.replace_all_uses_with(first)

    def _make_promise(self, steps: Sequence[Step]) -> PromisedLogits:
        """Describes how to compute logits, with these element-wise steps, from hidden states when they are read."""
        head = self._head
        narrow = head.as_read.meta["val"].dtype
        bias = parameter_read(head.bias) if head.bias is not None else ""
        narrow = None if narrow == self._weight.dtype else narrow
        keeps = self._options.keeps_logits
        return PromisedLogits(self._table, bias, steps_to_text(steps), narrow, self._chunks, keeps)

    # -- the table's gradient ------------------------------------------------------------------------------------------

    def _remove_term(
        self, term: fx.Node, outputs: Sequence[tuple[fx.Node | None, OutputRole]]
    ) -> list[tuple[fx.Node | None, OutputRole]]:
        """Removes `term`, the gradient from the output layer, from the table's gradient in the graph. Returns the
        graph's new outputs: (value or None, role).
        """
        role = Gradient(Parameter(self._table))
        if any(value is term and each == role for value, each in outputs):
            return [(value, each) for value, each in outputs if each != role]
        (total,) = term.users
        (rest,) = [each for each in total.all_input_nodes if each is not term]
        kept = [(rest if value is total else value, each) for value, each in outputs]
        total.replace_all_uses_with(rest, delete_user_cb=lambda user: user.op != "output")
        return kept
