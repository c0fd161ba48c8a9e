"""What happens when a rank fails or dies: every other rank raises, with the culprit's name."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_PATIENCE_S = 5.0
_FAREWELL_S = 5.0
_LISTEN_S = 0.5
_POLL_S = 0.1


class PeerFailure(RuntimeError):
    """At least one rank could not take part in a step; raised on every rank, before anything was applied.

    Attributes:
        by_rank: what each failed rank reported.
    """

    def __init__(self, by_rank: Mapping[int, str]) -> None:
        self.by_rank = dict(by_rank)
        reports = "; ".join(f"rank {rank}: {text.removesuffix('.')}" for rank, text in sorted(by_rank.items()))
        super().__init__(f"{reports}. Nothing of this step was applied, on any rank.")

    def __reduce__(self) -> tuple[type[PeerFailure], tuple[dict[int, str]]]:
        return PeerFailure, (self.by_rank,)


class DeadRank(RuntimeError):
    """A collective failed because a rank is gone."""


class RollCall:
    """Tells the dead from the living after a collective broke.

    The first rank to meet the error calls the roll in the store; a thread on every rank hears it and signs, even while
    the rank's main thread is still blocked in a collective. Who does not sign in a few seconds is dead. The verdict is
    written down, and its writer waits until the living have read it: the store may live in the writer's own process.

    Args:
        store: the process group's store. The roll call talks to it over a connection of its own, in its own thread.
        name: unique among the communicators of one store.
    """

    def __init__(self, store: Any, name: str, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._store: Any = store.clone()
        self._called = f"embrace_fx/{name}/called"
        self._verdict = f"embrace_fx/{name}/verdict"
        self._signatures = [f"embrace_fx/{name}/alive/{r}" for r in range(world_size)]
        self._readers = [f"embrace_fx/{name}/read/{r}" for r in range(world_size)]
        self._missing: list[int] = []
        self._wake, self._decided = threading.Event(), threading.Event()
        self._closed = False
        self._listener = threading.Thread(target=self._listen, name="embrace_fx roll call", daemon=True)
        self._listener.start()

    def close(self) -> None:
        """Ends the thread: one that still asks the store when the interpreter goes ends the process by abort()."""
        self._closed = True
        self._wake.set()
        if self._listener is not threading.current_thread():
            self._listener.join(_FAREWELL_S)

    def missing(self) -> list[int]:
        """Calls the roll and returns the ranks that do not answer."""
        self._wake.set()
        self._decided.wait()
        return self._missing

    def _listen(self) -> None:
        try:
            while not self._wake.wait(_LISTEN_S) and not self._store.check([self._called]):
                pass
            if not self._closed:
                self._missing = self._call()
        except RuntimeError:
            self._missing = [
                0
            ]  # the store itself is gone: without a launcher that holds it, it lived in rank 0's process
        self._decided.set()

    def _call(self) -> list[int]:
        self._store.set(self._called, "1")
        self._store.set(self._signatures[self.rank], "1")
        self._await(lambda: self._store.check(self._signatures) or self._store.check([self._verdict]), _PATIENCE_S)
        if not self._store.check([self._verdict]):
            silent = [r for r, name in enumerate(self._signatures) if not self._store.check([name])]
            self._store.set(self._verdict, ",".join(map(str, silent)))
        missing = [int(r) for r in self._store.get(self._verdict).decode().split(",") if r]
        with contextlib.suppress(RuntimeError):  # from here on the store may go: this rank knows enough
            self._store.set(self._readers[self.rank], "1")
            living = [name for r, name in enumerate(self._readers) if r not in missing]
            self._await(lambda: self._store.check(living), _FAREWELL_S)
        return missing

    def _await(self, condition: Callable[[], bool], patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and not condition():
            time.sleep(_POLL_S)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Turns the error of a broken collective into one that names the ranks that no longer answer."""
        try:
            yield
        except (PeerFailure, DeadRank):
            raise
        except RuntimeError as error:
            missing = self.missing()
            found = (
                f"rank(s) {', '.join(map(str, missing))} no longer answer" if missing else "a rank stopped taking part"
            )
            raise DeadRank(
                f"expected every rank to take part in a collective, on rank {self.rank}; found that {found} "
                f"({error}). Look at the log of the ranks named, and restart the job from a checkpoint."
            ) from error
