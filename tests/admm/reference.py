"""One iteration written straight from the formulas: one sequence, one step, one number at a time, in floats.

Nothing is shared with the package but the step constants of the matrices (tau, |V|^2, |W|^2), which are given: any
value at least the curvature is right, and which one the package takes is tested by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from embrace_fx.admm.lagrangian import Penalties, Variables
from embrace_fx.admm.model import Data, Weights

Vector = list[float]
Matrix = list[Vector]


@dataclass(frozen=True)
class Constants:
    """Of the matrices' steps, as functions of the matrices and states at the time of the step."""

    curvature: Callable[[Tensor, Tensor], float]
    squared_norm: Callable[[Tensor], float]


def dot(matrix: Matrix, vector: Vector) -> Vector:
    return [sum(m * v for m, v in zip(row, vector, strict=True)) for row in matrix]


def transposed_dot(matrix: Matrix, vector: Vector) -> Vector:
    return [sum(matrix[k][j] * vector[k] for k in range(len(matrix))) for j in range(len(matrix[0]))]


class Reference:
    """The problem as nested lists: a[n][i][h] of step n, sequence i, unit h."""

    def __init__(
        self,
        weights: Weights,
        variables: Variables,
        data: Data,
        penalties: Penalties,
        constants: Constants,
        repeats: int,
    ) -> None:
        self.U, self.W, self.b, self.V, self.c = (tensor.tolist() for tensor in weights.tensors())
        self.a, self.s, self.o = (t.tolist() for t in (variables.a_NBH, variables.s_NBH, variables.o_MBC))
        self.l1, self.l2, self.l3 = (t.tolist() for t in (variables.l1_BH, variables.l2_BH, variables.l3_BC))
        self.x, self.y = data.x_NBI.tolist(), data.y_MB.tolist()
        self.penalties, self.constants, self.repeats = penalties, constants, repeats
        self.N, self.B, self.M = len(self.x), len(self.x[0]), len(self.y)
        self.first = self.N - self.M  # the first step that the head reads

    # -- residuals r^, which are less l / p at the last step -----------------------------------------------------------

    def ra(self, n: int, i: int, shifted: bool = True) -> Vector:
        before = self.s[n - 1][i] if n else [0.0] * len(self.b)
        Ux, Ws = dot(self.U, self.x[n][i]), dot(self.W, before)
        r = [self.a[n][i][h] - Ux[h] - Ws[h] - self.b[h] for h in range(len(self.b))]
        return [r[h] - self.l1[i][h] / self.penalties.p1 for h in range(len(r))] if shifted and self.last(n) else r

    def rs(self, n: int, i: int, shifted: bool = True) -> Vector:
        r = [self.s[n][i][h] - math.tanh(self.a[n][i][h]) for h in range(len(self.b))]
        return [r[h] - self.l2[i][h] / self.penalties.p2 for h in range(len(r))] if shifted and self.last(n) else r

    def ro(self, n: int, i: int, shifted: bool = True) -> Vector:
        Vs = dot(self.V, self.s[n][i])
        r = [self.o[n - self.first][i][j] - Vs[j] - self.c[j] for j in range(len(self.c))]
        return [r[j] - self.l3[i][j] / self.penalties.p3 for j in range(len(r))] if shifted and self.last(n) else r

    def last(self, n: int) -> bool:
        return n == self.N - 1

    def w(self, n: int, p: float) -> float:
        return p if self.last(n) else self.penalties.mu

    def w1(self, n: int) -> float:
        return self.w(n, self.penalties.p1)

    def w2(self, n: int) -> float:
        return self.w(n, self.penalties.p2)

    def w3(self, n: int) -> float:
        return self.w(n, self.penalties.p3)

    def everything(self, head: bool = False) -> list[tuple[int, int]]:
        return [(n, i) for n in range(self.first if head else 0, self.N) for i in range(self.B)]

    # -- blocks --------------------------------------------------------------------------------------------------------

    def update_o(self) -> None:
        for n, i in self.everything(head=True):
            o, r, w = self.o[n - self.first][i], self.ro(n, i), self.w3(n)
            total = sum(math.exp(value) for value in o)
            k = 0.5 + w
            for j, value in enumerate(list(o)):
                hit = 1.0 if j == self.y[n - self.first][i] else 0.0
                o[j] = value - (math.exp(value) / total - hit + w * r[j]) / k

    def update_c(self) -> None:
        weight = sum(self.w3(n) for n, _ in self.everything(head=True))
        residuals = [(self.w3(n), self.ro(n, i)) for n, i in self.everything(head=True)]
        self.c = [c + sum(w * r[j] for w, r in residuals) / weight for j, c in enumerate(self.c)]

    def update_b(self) -> None:
        weight = sum(self.w1(n) for n, _ in self.everything())
        residuals = [(self.w1(n), self.ra(n, i)) for n, i in self.everything()]
        self.b = [b + sum(w * r[h] for w, r in residuals) / weight for h, b in enumerate(self.b)]

    def update_V(self) -> None:
        for _ in range(self.repeats):
            terms = [(self.w3(n), self.ro(n, i), self.s[n][i]) for n, i in self.everything(head=True)]
            self.V = self._stepped(self.V, terms)

    def update_W(self) -> None:
        for _ in range(self.repeats):
            terms = [(self.w1(n), self.ra(n, i), self.s[n - 1][i]) for n, i in self.everything() if n]
            self.W = self._stepped(self.W, terms)

    def update_U(self) -> None:
        for _ in range(self.repeats):
            terms = [(self.w1(n), self.ra(n, i), self.x[n][i]) for n, i in self.everything()]
            self.U = self._stepped(self.U, terms)

    def _stepped(self, matrix: Matrix, terms: list[tuple[float, Vector, Vector]]) -> Matrix:
        if not terms:
            return matrix
        read = torch.tensor([[v] for _, _, v in terms], dtype=torch.float64)
        tau = self.constants.curvature(read, torch.tensor([[[w]] for w, _, _ in terms], dtype=torch.float64))
        return [
            [value + sum(w * r[k] * v[j] for w, r, v in terms) / tau for j, value in enumerate(row)]
            for k, row in enumerate(matrix)
        ]

    def update_s(self, n: int) -> None:
        norm_V = self.constants.squared_norm(torch.tensor(self.V, dtype=torch.float64))
        norm_W = self.constants.squared_norm(torch.tensor(self.W, dtype=torch.float64))
        for i in range(self.B):
            beta, pushes = 0.0, [0.0] * len(self.b)
            if n >= self.first:
                beta += self.w3(n) * norm_V
                push = transposed_dot(self.V, self.ro(n, i))
                pushes = [p + self.w3(n) * q for p, q in zip(pushes, push, strict=True)]
            if not self.last(n):
                beta += self.w1(n + 1) * norm_W
                push = transposed_dot(self.W, self.ra(n + 1, i))
                pushes = [p + self.w1(n + 1) * q for p, q in zip(pushes, push, strict=True)]
            w = self.w2(n)
            for h, value in enumerate(list(self.s[n][i])):
                wanted = math.tanh(self.a[n][i][h]) + (self.l2[i][h] / self.penalties.p2 if self.last(n) else 0.0)
                self.s[n][i][h] = (w * wanted + beta * value + pushes[h]) / (w + beta)

    def update_a(self, n: int) -> None:
        for i in range(self.B):
            ra, rs = self.ra(n, i), self.rs(n, i)
            for h, value in enumerate(list(self.a[n][i])):
                t = math.tanh(value)
                target = abs(rs[h] + t)
                k = self.w1(n) + self.w2(n) * (1 + 4 / math.sqrt(27) * target)
                self.a[n][i][h] = value - (self.w1(n) * ra[h] - self.w2(n) * rs[h] * (1 - t * t)) / k

    # -- an iteration --------------------------------------------------------------------------------------------------

    def iterate(self) -> None:
        for block in (self.update_o, self.update_c, self.update_V):
            block()
        for n in reversed(range(self.N)):
            self.update_s(n)
            self.update_a(n)
        for block in (self.update_b, self.update_W, self.update_U, self.update_U, self.update_W, self.update_b):
            block()
        for n in range(self.N):
            self.update_a(n)
            self.update_s(n)
        for block in (self.update_V, self.update_c, self.update_o):
            block()
        n, p = self.N - 1, self.penalties
        for multiplier, residual, penalty in (
            (self.l1, self.ra, p.p1),
            (self.l2, self.rs, p.p2),
            (self.l3, self.ro, p.p3),
        ):
            for i in range(self.B):
                r = residual(n, i, shifted=False)
                multiplier[i] = [value - p.dual_step * penalty * r[k] for k, value in enumerate(multiplier[i])]

    def weights(self) -> list[Tensor]:
        return [torch.tensor(each, dtype=torch.float64) for each in (self.U, self.W, self.b, self.V, self.c)]

    def variables(self) -> list[Tensor]:
        return [torch.tensor(e, dtype=torch.float64) for e in (self.a, self.s, self.o, self.l1, self.l2, self.l3)]
