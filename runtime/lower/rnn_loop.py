"""Runs recurrent layers by a Python loop over time steps: the "loop" kernel of `embrace::rnn_layer`.

It works on flat rows, step after step as in packed sequences; a padded input is the case where every step has B rows.
All values that do not depend on the step before are computed for all rows at once: the input's product with its
weights, the derivatives of the activations, the gradients of weights and input. Each step only computes one product
with the recurrent weights (two with a projection) and a few calls that write in place.

Shape legend: see `embrace_fx.vocabulary.rnn_ops`. A gradient of gates before their activation is called a delta.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embrace_fx.vocabulary.rnn_ops import LayerWeights

_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input


@dataclass(frozen=True)
class TimeOrder:
    """The order in which a layer processes its rows. A row is one sequence at one time step. Rows are sorted by time
    step, as in a packed sequence.
    """

    sizes: list[int]  # the number of rows (sequences) of each time step, which never increases
    reverse: bool  # whether the layer runs from the last step to the first

    @classmethod
    def of_input(cls, input: Tensor, batch_sizes: Tensor | None, reverse: bool) -> TimeOrder:
        """Returns the order for an input (T, B, *), or for packed rows if `batch_sizes` is given."""
        sizes: list[int] = [input.shape[1]] * input.shape[0] if batch_sizes is None else batch_sizes.tolist()
        if not sizes:
            raise ValueError("embrace::rnn_layer: the input has 0 time steps. Skip batches of empty sequences.")
        return cls(sizes, reverse)

    def steps(self, rows: Tensor) -> list[Tensor]:
        """Returns the rows of each time step as views of `rows` (R, ...), in processing order."""
        steps = list(rows.split(self.sizes))
        return steps[::-1] if self.reverse else steps

    def previous(self, initial: Tensor, rows: Tensor) -> Tensor:
        """Returns the state (R, ...) before each row, given the state after each (`rows`): that after the sequence's
        previous row in processing order, or the sequence's initial state (B, ...).
        """
        states = []
        before = initial
        for step in self.steps(rows):
            states.append(step_state(initial, before, step.shape[0]))
            before = step
        return torch.cat(states[::-1] if self.reverse else states)

    def ends(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns, for each sequence, the indices of the rows that are processed (first (B,), last (B,)).

        Example: with sizes [2, 1], sequence 0 has rows 0 and 2, and sequence 1 has row 1. The result is ([0, 1], [2,
        1]) if the layer runs forward in time.
        """
        alive_TB, row_TB = self._table()
        early = row_TB[0]
        late = row_TB.gather(0, (alive_TB.sum(0) - 1).unsqueeze(0)).squeeze(0)
        first, last = (late, early) if self.reverse else (early, late)
        return _copy_indices(first, device), _copy_indices(last, device)

    def reversal(self, device: torch.device) -> Tensor:
        """Returns the permutation of rows (R,) that reverses every sequence in time, and is its own inverse.

        Example: with sizes [2, 1], sequence 0 has rows 0 and 2, which are swapped. The result is [2, 1, 0].
        """
        alive_TB, row_TB = self._table()
        step_T1 = torch.arange(len(self.sizes), device="cpu").unsqueeze(1)
        mirrored_TB = (alive_TB.sum(0) - 1 - step_T1).clamp(min=0)
        return _copy_indices(row_TB.gather(0, mirrored_TB)[alive_TB], device)

    def _table(self) -> tuple[Tensor, Tensor]:
        """Returns, as (T, B) each, which time steps a sequence has, and the row of each sequence at each time step."""
        sizes_T1 = torch.tensor(self.sizes, device="cpu").unsqueeze(1)
        sequence_B = torch.arange(self.sizes[0], device="cpu")
        return sizes_T1 > sequence_B, sizes_T1.cumsum(0) - sizes_T1 + sequence_B


def step_state(initial: Tensor, before: Tensor, rows: int) -> Tensor:
    """Returns the state (rows, ...) with which a time step starts, given that after the previously processed step
    (`before`): without sequences that have ended, and with the initial state of sequences that begin.
    """
    if before.shape[0] >= rows:
        return _first_rows(before, rows)
    return torch.cat([before, initial[before.shape[0] : rows]])


def _from_last_step(walk: TimeOrder, *columns: Tensor) -> list[tuple[Any, Any]]:
    """Returns, from the last step to the first, (each column's rows of a step, those of the step before or None)."""
    steps = list(zip(*map(walk.steps, columns), strict=True))[::-1]
    return [*zip(steps, [*steps[1:], None], strict=True)]


def _first_rows(tensor: Tensor, rows: int) -> Tensor:
    """Returns the first `rows` rows of a tensor."""
    # Slices cost as much as a small kernel; with padded inputs nothing is cut off.
    return tensor if tensor.shape[0] == rows else tensor[:rows]


def _input_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the product of inputs and a weight, plus the bias if given."""
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _sum_of_biases(w: LayerWeights) -> Tensor | None:
    """Returns the sum of a layer's two biases, or None without biases."""
    return None if w.bias_ih is None or w.bias_hh is None else w.bias_ih + w.bias_hh


def _weight_gradients(
    delta_x: Tensor, delta_h: Tensor, x: Tensor, previous: Tensor, w: LayerWeights, input_grad: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """Computes the gradients of a layer's input and weights.

    Args:
        delta_x, delta_h: (R, G*H), the gradients of the products of the input, and of the hidden state, with their
            weights.
        previous: the hidden state before each row.

    Returns:
        (Gradient of the input (R, I) or None, [gradient of the input weight, of the hidden weight, of the biases if
            any]).
    """
    gradients = [delta_x.t() @ x, delta_h.t() @ previous]
    if w.bias_ih is not None:
        gradients += [delta_x.sum(0), delta_h.sum(0)]
    return delta_x @ w.ih if input_grad else None, gradients


@dataclass(frozen=True)
class Backward:
    """The gradients of one layer: of the input (R, I) if needed, the initial hidden state (B, P), the initial cell
    state (B, H) of an LSTM, and each weight and bias.
    """

    input: Tensor | None
    h0: Tensor
    c0: Tensor | None
    weights: list[Tensor]


LayerRows = tuple[Tensor, Tensor, Tensor | None, LayerWeights, TimeOrder]
"""What a layer computes with: its input x (R, I), the initial hidden states h0 (B, P) and, of an LSTM, cell states c0
(B, H), its weights, and the order of its steps."""


def lstm_forward(layer: LayerRows) -> list[Tensor]:
    """Runs an LSTM layer. Returns [output (R, P), activated gates (R, 4H), cells (R, H)], and with a projection the
    hidden states before it (R, H).
    """
    x, h0, c0, w, walk = layer
    assert c0 is not None
    hidden_size = c0.shape[1]
    gates = _input_product(x, w.ih, _sum_of_biases(w))
    cells, hidden = (x.new_empty(x.shape[0], hidden_size) for _ in range(2))
    output = hidden if w.projection is None else x.new_empty(x.shape[0], w.projection.shape[0])
    recurrent = w.hh.t()
    projection = None if w.projection is None else w.projection.t()
    tanh_cell = x.new_empty(c0.shape)
    in_forget = walk.steps(gates[:, : 2 * hidden_size])
    columns = [walk.steps(part) for part in gates.chunk(4, 1)]
    h, c = h0, c0
    for gate, sigmoids, i, f, g, o, cell, hid, out in zip(
        walk.steps(gates), in_forget, *columns, walk.steps(cells), walk.steps(hidden), walk.steps(output), strict=True
    ):
        rows = gate.shape[0]
        gate.addmm_(step_state(h0, h, rows), recurrent)
        sigmoids.sigmoid_()
        g.tanh_()
        o.sigmoid_()
        torch.mul(f, step_state(c0, c, rows), out=cell)
        cell.addcmul_(i, g)
        torch.mul(o, torch.tanh(cell, out=_first_rows(tanh_cell, rows)), out=hid)
        if projection is not None:
            torch.mm(hid, projection, out=out)
        h, c = out, cell
    return [output, gates, cells] if projection is None else [output, gates, cells, hidden]


def lstm_backward(
    layer: LayerRows, results: Sequence[Tensor], grad_output: Tensor, grad_cells: Tensor, input_grad: bool
) -> Backward:
    """Computes an LSTM layer's gradients from the results of `lstm_forward`, and from the gradients of the output (R,
    P) and cells (R, H), which it overwrites.
    """
    x, h0, c0, w, walk = layer
    assert c0 is not None
    output, gates, cells, *hidden = results
    rows, hidden_size = cells.shape
    i, f, g, o = gates.chunk(4, 1)
    tanh_cells = torch.tanh(cells)
    # Start with local factors. The loop multiplies i, f and g by the cell's gradient and o by the hidden state's.
    delta = torch.empty_like(gates)
    delta_i, delta_f, delta_g, delta_o = delta.chunk(4, 1)
    _sigmoid_backward(g, i, grad_input=delta_i)
    _sigmoid_backward(walk.previous(c0, cells), f, grad_input=delta_f)
    _tanh_backward(i, g, grad_input=delta_g)
    _sigmoid_backward(tanh_cells, o, grad_input=delta_o)
    hidden_to_cell = _tanh_backward(o, tanh_cells, grad_input=tanh_cells)

    delta_ifg = delta.view(rows, 4, hidden_size)[:, :3]
    grad_hidden = x.new_empty(h0.shape[0], hidden_size)
    columns = delta, delta_o, delta_ifg, hidden_to_cell, f, grad_output, grad_cells
    for (delta_t, delta_o_t, delta_ifg_t, to_cell, f_t, grad_h, grad_c), before in _from_last_step(walk, *columns):
        if w.projection is not None:
            grad_h = torch.mm(grad_h, w.projection, out=_first_rows(grad_hidden, grad_h.shape[0]))
        grad_c.addcmul_(grad_h, to_cell)
        delta_ifg_t.mul_(grad_c.unsqueeze(1))
        delta_o_t.mul_(grad_h)
        if before is not None:
            *_, grad_h_before, grad_c_before = before
            carried = min(grad_h_before.shape[0], grad_c.shape[0])
            _first_rows(grad_h_before, carried).addmm_(_first_rows(delta_t, carried), w.hh)
            _first_rows(grad_c_before, carried).addcmul_(_first_rows(grad_c, carried), _first_rows(f_t, carried))

    first, _ = walk.ends(x.device)
    grad_input, gradients = _weight_gradients(delta, delta, x, walk.previous(h0, output), w, input_grad)
    if w.projection is not None:
        gradients.append(grad_output.t() @ hidden[0])
    return Backward(grad_input, delta[first] @ w.hh, grad_cells[first] * f[first], gradients)


def gru_forward(layer: LayerRows) -> list[Tensor]:
    """Runs a GRU layer. Returns [output (R, H), activated gates (R, 3H), recurrent part of the new gate before it is
    multiplied by the reset gate (R, H)].
    """
    x, h0, _, w, walk = layer
    hidden_size = h0.shape[1]
    gates = _input_product(x, w.ih, w.bias_ih)
    output, new_recurrent = (x.new_empty(x.shape[0], hidden_size) for _ in range(2))
    sigmoid_weight, new_weight = w.hh[: 2 * hidden_size].t(), w.hh[2 * hidden_size :].t()
    if w.bias_hh is not None:
        gates[:, : 2 * hidden_size] += w.bias_hh[: 2 * hidden_size]
    new_bias = x.new_zeros(hidden_size) if w.bias_hh is None else w.bias_hh[2 * hidden_size :]
    columns = [walk.steps(part) for part in gates.chunk(3, 1)]
    h = h0
    for reset_update, r, z, n, new, out in zip(
        walk.steps(gates[:, : 2 * hidden_size]), *columns, walk.steps(new_recurrent), walk.steps(output), strict=True
    ):
        h = step_state(h0, h, out.shape[0])
        reset_update.addmm_(h, sigmoid_weight).sigmoid_()
        torch.addmm(new_bias, h, new_weight, out=new)
        n.addcmul_(r, new).tanh_()
        h = torch.lerp(n, h, z, out=out)
    return [output, gates, new_recurrent]


def gru_backward(layer: LayerRows, results: Sequence[Tensor], grad_output: Tensor, input_grad: bool) -> Backward:
    """Computes a GRU layer's gradients from the results of `gru_forward`, and from the gradient of the output (R, H),
    which it overwrites.
    """
    x, h0, _, w, walk = layer
    output, gates, new_recurrent = results
    rows, hidden_size = output.shape
    r, z, n = gates.chunk(3, 1)
    previous = walk.previous(h0, output)
    # Deltas of the gates, as columns n, r, z, n_h; n_h is the recurrent half of n. Input weights need n, r, z;
    # recurrent weights need r, z, n_h. Before the loop, a column holds only the local derivative. The loop multiplies
    # it by the gradient of the hidden state.
    delta = x.new_empty(rows, 4 * hidden_size)
    delta_n, delta_r, delta_z, delta_new = delta.chunk(4, 1)
    _tanh_backward(1 - z, n, grad_input=delta_n)
    torch.mul(delta_n, r, out=delta_new)
    _sigmoid_backward(delta_n * new_recurrent, r, grad_input=delta_r)
    _sigmoid_backward(previous - n, z, grad_input=delta_z)
    delta_x, delta_h = delta[:, : 3 * hidden_size], delta[:, hidden_size:]

    columns = delta.view(rows, 4, hidden_size), delta_h, z, grad_output
    for (delta_t, delta_h_t, z_t, grad_h), before in _from_last_step(walk, *columns):
        delta_t.mul_(grad_h.unsqueeze(1))
        if before is not None:
            grad_before = before[-1]
            carried = min(grad_before.shape[0], grad_h.shape[0])
            grad_before = _first_rows(grad_before, carried)
            grad_before.addmm_(_first_rows(delta_h_t, carried), w.hh)
            grad_before.addcmul_(_first_rows(grad_h, carried), _first_rows(z_t, carried))

    first, _ = walk.ends(x.device)
    rolled = w._replace(ih=w.ih.roll(hidden_size, 0))
    grad_input, gradients = _weight_gradients(delta_x, delta_h, x, previous, rolled, input_grad)
    gradients[0] = gradients[0].roll(-hidden_size, 0)
    if w.bias_ih is not None:
        gradients[2] = gradients[2].roll(-hidden_size, 0)
    grad_h0 = torch.addmm(grad_output[first] * z[first], delta_h[first], w.hh)
    return Backward(grad_input, grad_h0, None, gradients)


def rnn_forward(layer: LayerRows, cell: str) -> list[Tensor]:
    """Runs a layer of a plain RNN ("rnn_tanh" or "rnn_relu"). Returns [output (R, H)]."""
    x, h0, _, w, walk = layer
    output = _input_product(x, w.ih, _sum_of_biases(w))
    recurrent = w.hh.t()
    activate = torch.Tensor.tanh_ if cell == "rnn_tanh" else torch.Tensor.relu_
    h = h0
    for out in walk.steps(output):
        h = activate(out.addmm_(step_state(h0, h, out.shape[0]), recurrent))
    return [output]


def rnn_backward(layer: LayerRows, output: Tensor, grad_output: Tensor, cell: str, input_grad: bool) -> Backward:
    """Computes a plain RNN layer's gradients from its output and the output's gradient (R, H), which it overwrites."""
    x, h0, _, w, walk = layer
    derivative = 1 - output.square() if cell == "rnn_tanh" else (output > 0).to(output.dtype)
    for (delta, slope), before in _from_last_step(walk, grad_output, derivative):
        delta.mul_(slope)
        if before is not None:
            carried = min(before[0].shape[0], delta.shape[0])
            _first_rows(before[0], carried).addmm_(_first_rows(delta, carried), w.hh)
    first, _ = walk.ends(x.device)
    grad_input, gradients = _weight_gradients(grad_output, grad_output, x, walk.previous(h0, output), w, input_grad)
    return Backward(grad_input, grad_output[first] @ w.hh, None, gradients)


def _copy_indices(numbers: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of indices on the host to a device without waiting."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)
