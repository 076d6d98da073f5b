"""The workers as the HTTP side sees them."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from typing import Any, Callable, Dict, Iterator, List

import worker
from worker import Event, Task

START_TIMEOUT_S = 120.0
LOOK_S = 0.5       # how often a worker is looked at that says nothing
RESTART_S = 1.0    # until one that has ended is replaced
TASKS_MAX = 16     # per worker


class Busy(Exception):
    """All workers have as many tasks as they may."""


class _Handle:
    """A worker process, its tasks, and the thread that reads its events. A process that ends is
    replaced."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._streams: Dict[int, "queue.SimpleQueue[Event]"] = {}
        self._ready = False
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self.served = 0  # tasks up to now
        self._spawn()

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
        self._inbox: Any = context.Queue()
        self._outbox: Any = context.Queue()
        self._process = context.Process(target=worker.main, daemon=True,
                                        args=(self._target, self._inbox, self._outbox))
        self._process.start()

    def wait_ready(self) -> None:
        """RuntimeError if it does not come up."""
        try:
            event = self._outbox.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            event = Event(-1, reason="error", message="it did not come up in time")
        if event.reason:
            raise RuntimeError(f"worker: {event.message}")
        self._ready = True
        self._reader.start()

    @property
    def load(self) -> int:
        """Tasks under way."""
        with self._lock:
            return len(self._streams)

    @property
    def alive(self) -> bool:
        return self._ready and self._process.is_alive()

    def start(self, task: Task) -> "queue.SimpleQueue[Event]":
        stream: "queue.SimpleQueue[Event]" = queue.SimpleQueue()
        with self._lock:
            self._streams[task.number] = stream
            self.served += 1
            self._inbox.put(task)
        return stream

    def forget(self, number: int) -> None:
        """A task has ended, or is not wanted any more."""
        with self._lock:
            if self._streams.pop(number, None) is not None:
                self._inbox.put(number)

    def close(self) -> None:
        self._closing.set()
        self._inbox.put(None)
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()

    def _read(self) -> None:
        while True:
            try:
                event = self._outbox.get(timeout=LOOK_S)
            except queue.Empty:
                if not self._process.is_alive() and not self._replace():
                    return
                continue
            if event.number == -1:
                self._ready = not event.reason
            with self._lock:
                stream = self._streams.get(event.number)
            if stream is not None:
                stream.put(event)

    def _replace(self) -> bool:
        """Ends the tasks of a process that has ended, and starts another; false at the end."""
        self._ready = False
        self._end_all()
        if self._closing.wait(RESTART_S):
            return False
        with self._lock:
            self._spawn()
        self._end_all()  # tasks that arrived while it ended
        return True

    def _end_all(self) -> None:
        with self._lock:
            streams, self._streams = self._streams, {}
        for number, stream in streams.items():
            stream.put(Event(number, reason="error", message="the worker has ended"))


class Events:
    """Events of a task until each choice has ended, or until an error. Closing it cancels the task.
    """

    def __init__(self, handle: _Handle, task: Task, gone: Callable[[], bool]) -> None:
        self._handle, self._number, self._left, self._gone = handle, task.number, task.choices, gone
        self._stream = handle.start(task)

    def __iter__(self) -> Iterator[Event]:
        while self._left and not self._gone():
            try:
                event = self._stream.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            self._left -= event.reason in ("stop", "length")
            if event.reason == "error":
                self._left = 0
            yield event

    def close(self) -> None:
        """Also twice."""
        self._handle.forget(self._number)


class Pool:
    """Workers that share one attention server. Thread-safe."""

    def __init__(self, target: str, workers: int) -> None:
        """Starts them. RuntimeError if one does not come up."""
        self._workers: List[_Handle] = [_Handle(target) for _ in range(workers)]
        self._lock = threading.Lock()
        self._next = 0
        self.tasks_max = workers * TASKS_MAX
        try:
            for handle in self._workers:
                handle.wait_ready()
        except RuntimeError:
            self.close()
            raise

    def new_number(self) -> int:
        """Returns a new task number."""
        with self._lock:
            self._next += 1
            return self._next

    def run(self, task: Task, gone: Callable[[], bool] = lambda: False) -> Events:
        """Starts a task. Busy if no worker takes it. `gone`: says whether its client has gone,
        which ends the events."""
        with self._lock:
            ready = [handle for handle in self._workers
                     if handle.alive and handle.load < TASKS_MAX]
            if not ready:
                raise Busy
            return Events(min(ready, key=lambda handle: (handle.load, handle.served)), task, gone)

    def served(self) -> List[int]:
        """Tasks that each worker has had."""
        return [handle.served for handle in self._workers]

    def close(self) -> None:
        """Ends the workers."""
        for handle in self._workers:
            handle.close()
