"""Assigns roles to the inputs and outputs of AOTAutograd's graph, and removes nodes that matter only to autograd."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd import descriptors as aot
from torch.utils import _pytree as pytree

from embrace_fx.capture.errors import CaptureError
from embrace_fx.vocabulary.graph import (
    BatchInput,
    Buffer,
    Gradient,
    InputRole,
    LateModule,
    Mutation,
    OutputRole,
    Parameter,
    Result,
    Tangent,
    inputs_of,
    outputs_of,
)

_IDENTITIES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


@dataclass(frozen=True)
class GraphWithRoles:
    """A traced graph in which each input and output has a role, such as parameter, batch input or gradient.

    Attributes:
        module: the graph.
        constants: maps the index of a flattened result to its value, for results that are not tensors.
        batch: maps the index of a flattened argument to the graph's placeholder for that tensor or number.
    """

    module: fx.GraphModule
    constants: Mapping[int, Any]
    batch: Mapping[int, fx.Node]


def assign_roles(joint: fx.GraphModule, model: nn.Module, constants: Collection[int] = ()) -> GraphWithRoles:
    """Assigns a role, such as parameter, batch input or gradient, and a readable name to each input and output of a
    traced graph. Removes unused nodes.

    Args:
        joint: AOTAutograd's graph of forward and backward, with descriptions of inputs and outputs.
        constants: indices of the flattened arguments that are constants of the graph.

    Raises:
        CaptureError: an input or output has no such role, for example because a result is a view of another, or because
            the forward modifies a parameter and then reads it.
    """
    first_names = _first_names(model)
    module = _flat_module(joint)
    batch: dict[int, fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.op != "placeholder":
            continue
        if isinstance(node.meta["desc"], aot.TangentAOTInput) and not isinstance(
            node.meta["desc"].output, aot.PlainAOTOutput
        ):
            _drop_zero_tangent(module, node)
            continue
        role = _input_role(node.meta["desc"], first_names)
        node.meta["role"] = role
        if not isinstance(role, BatchInput):
            continue
        is_input = isinstance(node.meta.get("val"), Tensor | torch.SymInt | torch.SymFloat)
        if is_input and role.index not in constants:
            batch[role.index] = node
        else:
            module.graph.erase_node(node)  # this input is a constant, whose value is a condition of the graph
    of_results = _set_output_roles(module, first_names)
    _drop_identities(module)
    module.graph.eliminate_dead_code()
    _drop_unread_state(module)
    _name_placeholders(module)
    module.recompile()
    return GraphWithRoles(module, of_results, batch)


def _drop_zero_tangent(module: fx.GraphModule, tangent: fx.Node) -> None:
    """Removes an input of the graph that is always zero: the gradient of the value that a parameter has after the
    forward has modified it in place, as an embedding with `max_norm` does.

    Args:
        tangent: the placeholder of the input.

    Raises:
        CaptureError: the forward also computes with the modified value.
    """
    for user in list(tangent.users):
        if user.target is torch.ops.aten.add.Tensor and not user.kwargs:
            other = user.args[1] if user.args[0] is tangent else user.args[0]
            assert isinstance(other, fx.Node)
            user.replace_all_uses_with(other)
            module.graph.erase_node(user)
    if tangent.users:
        output = tangent.meta["desc"].output
        written = getattr(output, "mutated_input", output)
        raise CaptureError(
            f"The forward modifies the parameter {getattr(written, 'target', written.expr())} in place, and then "
            f"computes with the new value (graph nodes: {', '.join(u.name for u in tangent.users)}). Modify parameters "
            "outside of the forward, for example after optimizer.step()."
        )
    module.graph.erase_node(tangent)


def _first_names(model: nn.Module) -> dict[str, str]:
    """Maps every name of a parameter or buffer to the first name of the same tensor. Only tied parameters have several
    names.
    """
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for fqn, value in named:
            names[fqn] = first.setdefault(id(value), fqn)
    return names


def _flat_module(joint: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of AOTAutograd's graph with one flat list of placeholders and one tuple of outputs, instead of
    (primals, tangents).
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in joint.graph.nodes:
        if node.op == "output":
            values = pytree.tree_leaves(node.args[0])
            copied = tuple(env[v] if isinstance(v, fx.Node) else v for v in values)
            output = graph.output(copied)
            output.meta = dict(node.meta)
            output.meta["desc"] = pytree.tree_leaves(node.meta["desc"])
        else:
            env[node] = graph.node_copy(node, lambda n: env[n])
            env[node].meta = dict(node.meta)
    return LateModule(joint, graph)


def _input_role(desc: Any, first_names: Mapping[str, str]) -> InputRole:
    """Returns the role of a graph's input.

    Args:
        desc: AOTAutograd's description of the input.
        first_names: maps every name of a parameter or buffer to the first name of the same tensor.

    Raises:
        CaptureError: the input has no role, for example because a result is a view.
    """
    match desc:
        case aot.ParamAOTInput(target=target):
            return Parameter(first_names[target])
        case aot.BufferAOTInput(target=target):
            return Buffer(first_names[target])
        case aot.PlainAOTInput(idx=index):
            return BatchInput(index)
        case aot.TangentAOTInput(output=aot.PlainAOTOutput(idx=index)):
            return Tangent(index)
    raise CaptureError(
        f"The forward cannot be captured, because it seems to return views of an argument or of another result (graph "
        f"input: {desc}). Return copies instead, such as `x.clone()`."
    )


def _set_output_roles(module: fx.GraphModule, first_names: Mapping[str, str]) -> dict[int, Any]:
    """Sets the roles of a graph's outputs. Removes outputs that are constants, and returns these by their index among
    the results.

    Args:
        first_names: maps every name of a parameter or buffer to the first name of the same tensor.
    """
    output = module.graph.output_node()
    values: list[fx.Node] = []
    roles: list[OutputRole] = []
    constants: dict[int, Any] = {}
    for value, desc in zip(output.args[0], output.meta.pop("desc"), strict=True):  # type: ignore[arg-type]
        if desc is None:  # torch describes no gradient for an integer input
            continue
        role: OutputRole
        match desc:
            case aot.PlainAOTOutput(idx=index):
                role = Result(index)
            case aot.InputMutationAOTOutput(mutated_input=mutated):
                of = _input_role(mutated, first_names)
                assert isinstance(of, Parameter | Buffer | BatchInput)
                role = Mutation(of)
            case aot.GradAOTOutput(grad_of=grad_of):
                source = _input_role(grad_of, first_names)
                assert isinstance(source, Parameter | Buffer | BatchInput)
                if value is None or isinstance(source, Buffer):
                    continue
                role = Gradient(source)
            case _:
                raise CaptureError(
                    "The forward cannot be captured, because it seems to return views of an argument or of another "
                    f"result (graph output: {desc}). Return copies instead, such as `x.clone()`."
                )
        if isinstance(value, fx.Node):
            values.append(value)
            roles.append(role)
        elif isinstance(role, Result):
            constants[role.index] = value
    output.args = (tuple(values),)
    output.meta["roles"] = tuple(roles)
    return constants


def _drop_identities(module: fx.GraphModule) -> None:
    """Removes nodes that return their input, such as `detach`, which matter only to autograd."""
    for node in list(module.graph.nodes):
        if node.target in _IDENTITIES:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)


def _drop_unread_state(module: fx.GraphModule) -> None:
    """Removes the inputs for parameters and buffers that the graph neither reads nor writes."""
    kept = {value for value, _ in outputs_of(module)}
    written = {role.of for _, role in outputs_of(module) if isinstance(role, Mutation)}
    for node, role in list(inputs_of(module)):
        if isinstance(role, Parameter | Buffer) and not node.users and node not in kept and role not in written:
            module.graph.erase_node(node)


def _name_placeholders(module: fx.GraphModule) -> None:
    """Names placeholders after their roles, to make printed graphs readable."""
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        match node.meta["role"]:
            case Parameter(name) | Buffer(name):
                wanted = re.sub(r"\W", "_", name)
            case BatchInput(index):
                wanted = f"batch_{index}"
            case Tangent(index):
                wanted = f"tangent_{index}"
        node._rename(wanted)
        node.target = node.name
