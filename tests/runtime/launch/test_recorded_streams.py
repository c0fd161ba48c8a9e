"""What a training enqueues on a device's streams, recorded on ranks without one: proved, and as predicted.

The runtime that is recorded is the one that a GPU gets: only streams and events are on paper.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import embrace_fx
from embrace_fx.vocabulary.operation_id import BETWEEN, END, OperationId
from embrace_fx.vocabulary.schedule import IN_FLIGHT, SCHEDULES, ScheduleName
from tests.support.cases import long_but
from tests.support.models import MODELS, Workload
from tests.support.question_answering import QuestionAnsweringWorkload
from tests.support.ranks import run_ranks
from tests.support.streams.recorded_streams import RecordedStreams
from tests.support.streams.schedule_program import FLAGS, stream_program
from tests.support.streams.stream_order import different_orders, hazards, verify_streams
from tests.support.streams.stream_program import HostRead, Launch, Step, StreamProgram, WaitEvent
from tests.support.streams.trainings import on_paper
from tests.support.training import SEED, Way, make_optimizers, train_compiled, trained

WARM_UP, RECORDED = 4, 3
"""Steps before and within a recording; after these the order would follow a profile."""

WORKLOADS: dict[str, Workload] = {
    "lstm": dict(MODELS)["two_table_lm"],
    "recommender": dict(MODELS)["bag_recommender"],
    "transformer": dict(MODELS)["transformer_encoder"],
    "bert": QuestionAnsweringWorkload(),
}
MODELS_RECORDED = [pytest.param(m, marks=() if m == "lstm" else pytest.mark.long) for m in WORKLOADS]


@dataclass(frozen=True)
class Recorded:
    """One rank's steady steps.

    Attributes:
        program: what was enqueued.
        predicted: what the schedule says.
        launch_order: of the schedule.
        host_waits: what would have made the host wait for the device.
        parameters: after the training.
    """

    program: StreamProgram
    predicted: StreamProgram
    launch_order: tuple[str, ...]
    host_waits: list[str]
    parameters: dict[str, Tensor]


def records(rank: int, world_size: int, model: str, schedule: ScheduleName, kind: str = "sound") -> Recorded:
    with on_paper(kind) as recorded:
        workload = WORKLOADS[model]
        module = workload.make(torch.float64, seed=SEED + rank)
        optimizers = make_optimizers("adagrad", module)
        compiled = embrace_fx.compile(module, optimizer=optimizers, strategy="alltoall", schedule=schedule)
        batches = [workload.batches(step, rank, SEED) for step in range(WARM_UP + RECORDED + 1)]
        coming = iter(compiled.lookahead(batches))
        _train(compiled, (next(coming) for _ in range(WARM_UP - 1)))
        # Whoever reads state has pending updates applied: the step after it is not a steady one.
        recorded.expect_on_host(state["step"] for each in optimizers for state in each.state.values())
        _train(compiled, (next(coming) for _ in range(1)))
        recorder = compiled._session.planned.flow.recorder  # type: ignore[union-attr]
        mark = recorder.mark

        def noted(operation: OperationId) -> None:
            recorded.steps.append(f"{_MARK}{operation}")
            mark(operation)

        recorder.mark = noted  # type: ignore[method-assign]
        with recorded:
            _train(compiled, (next(coming) for _ in range(RECORDED)))
        recorder.mark = mark  # type: ignore[method-assign]
        found = recorded.program(f"{model} under {schedule}, rank {rank}")
        _train(compiled, coming)
        return Recorded(
            found,
            stream_program(compiled.schedule, windows=4),
            compiled.schedule.launch_order,
            recorded.host_waits,
            trained(compiled).parameters,
        )


def _train(compiled: embrace_fx.CompiledModel, batches: Iterable[tuple[Tensor, ...]]) -> None:
    for batch in batches:
        compiled(*batch).backward()
        for each in compiled.optimizer:
            each.step()
            each.zero_grad()


_MARK = "done: "


@pytest.mark.parametrize("schedule", long_but(("none", "2d"), {each: (each,) for each in SCHEDULES}))
@pytest.mark.parametrize("model", MODELS_RECORDED)
def test_a_training_on_streams(model: str, schedule: ScheduleName) -> None:
    """Ordered by events, as predicted, the same on all ranks; with the parameters of a training on the CPU.

    Where the next batch is known, nothing asks the device for a value: the host reads what was copied before, the sizes
    of the batch and whether the loss is finite.
    """
    ranks = run_ranks(2, records, model, schedule)

    for each in ranks:
        verify_streams(each.program, IN_FLIGHT, ordered=(FLAGS, *each.launch_order))
        assert set(_launched(each)) == set(_expected_launches(each.predicted))
        if schedule in ("horizontal", "2d"):
            assert _waits(each.program) == _waits_predicted(each.predicted)
        if schedule in ("vertical", "2d"):
            assert each.host_waits == []
            begun = next(k for k, step in enumerate(each.program.steps) if isinstance(step, str))
            reads = [step for step in each.program.steps[begun:] if isinstance(step, HostRead)]
            assert len(reads) == 2 * RECORDED
    assert different_orders([each.program for each in ranks]) == []
    for name, value in _trained_on_cpu(model).items():
        assert torch.equal(ranks[0].parameters[name], value), name


@functools.cache
def _trained_on_cpu(model: str) -> dict[str, Tensor]:
    """Under any schedule: on two ranks they agree to the bit."""
    way = Way(schedule="none", steps=WARM_UP + RECORDED + 1)
    parameters: dict[str, Tensor] = run_ranks(
        2, train_compiled, WORKLOADS[model], torch.float64, "adagrad", "exact", way
    )[0].parameters
    return parameters


def _launched(each: Recorded) -> list[str]:
    """Launches of the last window that lies within the recording as a whole."""
    names = [launch.op for launch in each.program.launches() if launch.op in (FLAGS, *each.launch_order)]
    period = len(set(names))
    assert names[-period:] == [*names[-2 * period : -period]]  # window after window the same
    return names[-period:]


def _expected_launches(predicted: StreamProgram) -> list[str]:
    return [launch.op for launch in predicted.launches() if launch.stream != "compute"]


def _waits(recorded: StreamProgram) -> dict[str, set[str]]:
    """By compute operation, whose ends it waits for, in the recording's last whole window."""
    found: dict[str, set[str]] = {}
    waiting: set[str] = set()
    last = ""
    for step in recorded.steps:
        if isinstance(step, WaitEvent) and step.stream == "compute":
            waiting.add(step.event.partition(" done #")[0])
        elif isinstance(step, str) and step.startswith(_MARK):
            name = step.removeprefix(_MARK)  # more of the same operation, or another one
            found[name] = found[name] | waiting if name == last else waiting
            waiting, last = set(), name
    return _normal(found)


def _waits_predicted(predicted: StreamProgram) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    waiting: set[str] = set()
    for step in predicted.records():
        if isinstance(step, WaitEvent) and step.stream == "compute":
            waiting.add(step.event.partition(" done@")[0])
        elif hasattr(step, "op") and getattr(step, "stream", "") == "compute" and not isinstance(step, Launch):
            found[step.op] = waiting
            waiting = set()
    return _normal(found)


def _normal(found: dict[str, set[str]]) -> dict[str, set[str]]:
    """What the end of a backward and the step wait for counts as one: programs differ in where they stand still."""
    found = {name: set(waits) for name, waits in found.items()}
    found[str(BETWEEN)] = found.pop(str(END), set()) | found.get(str(BETWEEN), set())
    return {name: waits for name, waits in found.items() if waits}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("forgetful", "to be freed to stream"), ("deaf compute", "to be read by"), ("deaf classes", "to be read by")],
)
def test_a_runtime_that_leaves_something_unordered_is_found(kind: str, expected: str) -> None:
    (each, _) = run_ranks(2, records, "lstm", "2d", kind)

    found = hazards(each.program)

    assert found
    assert any(expected in text for text in found)


def trains_while_one_rank_stops(rank: int, world_size: int) -> dict[str, Tensor]:
    """Between two steps, rank 0 asks for its parameters, and the others wait for it in a barrier of the user's."""
    with on_paper():
        workload = WORKLOADS["lstm"]
        module = workload.make(torch.float64, seed=SEED + rank)
        compiled = embrace_fx.compile(module, optimizer=make_optimizers("adagrad", module), strategy="alltoall")
        for step, batch in enumerate(compiled.lookahead([workload.batches(k, rank, SEED) for k in range(6)])):
            _train(compiled, [batch])
            flow = compiled._session.planned.flow
            assert flow is not None
            if step == 0:  # delayed gradients stand behind what the forward submits
                launches = sorted(flow.launcher._order, key=lambda launch: launch.lane == "delayed")
                flow.launcher.reorder(launches)
            elif step in (2, 4):
                if rank == 0:
                    compiled.synchronize()
                dist.barrier()
        return trained(compiled).parameters


def test_no_rank_waits_for_ever_for_one_that_asks_early() -> None:
    found = run_ranks(2, trains_while_one_rank_stops)

    way = Way(schedule="none", steps=6)
    expected = run_ranks(2, train_compiled, WORKLOADS["lstm"], torch.float64, "adagrad", "exact", way)
    for name, value in expected[0].parameters.items():
        assert torch.equal(found[0][name], value), name


def records_alone(rank: int, world_size: int, model: str) -> tuple[StreamProgram, list[str], dict[str, Tensor]]:
    with on_paper() as recorded:
        workload = WORKLOADS[model]
        module = workload.make(torch.float64, seed=SEED)
        optimizers = make_optimizers("adagrad", module)
        compiled = embrace_fx.compile(module, optimizer=optimizers, strategy="alltoall")
        batches = [workload.batches(step, rank, SEED) for step in range(WARM_UP + RECORDED)]
        _train(compiled, batches[:WARM_UP])
        recorded.expect_on_host(state["step"] for each in optimizers for state in each.state.values())
        with recorded:
            _train(compiled, batches[WARM_UP:])
        return recorded.program(f"{model}, alone"), recorded.host_waits, trained(compiled).parameters


@pytest.mark.parametrize("model", MODELS_RECORDED)
def test_a_single_process_asks_the_device_for_nothing_either(model: str) -> None:
    ((found, host_waits, parameters),) = run_ranks(1, records_alone, model)

    verify_streams(found)
    assert host_waits == []
    assert sum(isinstance(step, HostRead) for step in found.steps) >= 2 * RECORDED
    way = Way(lookahead=False, steps=WARM_UP + RECORDED)
    (on_cpu,) = run_ranks(1, train_compiled, WORKLOADS[model], torch.float64, "adagrad", "exact", way)
    for name, value in on_cpu.parameters.items():
        assert torch.equal(parameters[name], value), name


def trains_on_a_bad_id(rank: int, world_size: int) -> dict[str, Tensor]:
    with on_paper():
        module = torch.nn.EmbeddingBag(5, 4, mode="sum", padding_idx=0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        compiled = embrace_fx.compile(module, optimizer=optimizer, strategy="alltoall")
        ids, offsets = torch.tensor([0, 3, 4]), torch.tensor([0])
        compiled(ids, offsets).sum().backward()
        before = module.weight.detach().clone()
        with pytest.raises(embrace_fx.PeerFailure, match="expected ids from 0 to 4, in a lookup of weight"):
            compiled(ids + 1, offsets).sum().backward()
        return {"before": before, "after": module.weight.detach().clone()}


def test_a_single_process_on_a_device_raises_for_a_bad_id_in_its_backward() -> None:
    (found,) = run_ranks(1, trains_on_a_bad_id)

    assert torch.equal(found["before"], found["after"])


BAD_STEP = 3


def meets_a_bad_id(rank: int, world_size: int, paper: bool) -> tuple[list[tuple[int, list[int]]], dict[str, Tensor]]:
    """The steps that failed, with the ranks named; the parameters. Rank 1's fourth batch holds an id outside."""
    with on_paper() if paper else nullcontext():
        torch.manual_seed(0)
        module = torch.nn.EmbeddingBag(50, 4, mode="sum")
        optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1)
        compiled = embrace_fx.compile(module, optimizer=optimizer, strategy="alltoall")
        batches = [(torch.randint(50, (6,)), torch.tensor([0, 3])) for _ in range(6)]
        if rank == 1:
            batches[BAD_STEP][0][2] = 50
        failed = []
        for step, batch in enumerate(compiled.lookahead(batches)):
            try:
                compiled(*batch).square().sum().backward()
            except embrace_fx.PeerFailure as failure:
                failed.append((step, list(failure.by_rank)))
                continue
            optimizer.step()
            optimizer.zero_grad()
        return failed, trained(compiled).parameters


def test_a_bad_id_of_the_next_batch_fails_at_its_turn_on_every_rank() -> None:
    expected = run_ranks(2, meets_a_bad_id, False)

    for (failed, parameters), (failed_on_cpu, parameters_on_cpu) in zip(
        run_ranks(2, meets_a_bad_id, True), expected, strict=True
    ):
        assert failed == failed_on_cpu == [(BAD_STEP, [1])]
        assert torch.equal(parameters["weight"], parameters_on_cpu["weight"])


def _kinds(steps: Iterable[Step | str]) -> list[str]:
    return [type(step).__name__ for step in steps]


def test_what_is_written_down() -> None:
    recorded = RecordedStreams()
    with recorded:
        made = torch.zeros(3)
        there = recorded.record("made")
        with recorded.on("dense", "reduce"):
            recorded.wait(there)
            made.add_(1)
            recorded.keep(made)
            copy, done = recorded.to_host(made), recorded.record("copied")
        assert made.view(3, 1).shape == (3, 1)  # a view is no work
        assert recorded.read(done, copy) == [1.0, 1.0, 1.0]
        del made
        assert float(torch.ones(()).sum()) == 1.0

    expected = ["Kernels", "Record", "WaitEvent", "Kernels", "Keep", "Kernels", "Record", "HostRead", "Free", "Kernels"]
    assert _kinds(recorded.steps)[: len(expected)] == expected
    assert recorded.host_waits == ["aten::_local_scalar_dense on stream 'compute'"]
