"""The workers as the HTTP side sees them."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from typing import Any, Dict, Iterator, List, Optional

import worker
from worker import Event, Task

START_TIMEOUT_S = 120.0
LOOK_S = 0.5       # how often a worker is looked at that says nothing
TASKS_MAX = 16     # of a worker


class Busy(Exception):
    """All workers have as many tasks as they may."""


class _Handle:
    """A worker process, its tasks and the thread that reads what it says."""

    def __init__(self, target: str) -> None:
        context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
        self.inbox: Any = context.Queue()
        self._outbox: Any = context.Queue()
        self._process = context.Process(target=worker.main, daemon=True,
                                        args=(target, self.inbox, self._outbox))
        self._process.start()
        self._lock = threading.Lock()
        self._streams: Dict[int, "queue.SimpleQueue[Event]"] = {}
        self.served = 0  # tasks so far

    def wait_ready(self) -> None:
        """RuntimeError if it does not come up."""
        try:
            event = self._outbox.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            event = Event(-1, reason="error", message="it did not come up in time")
        if event.reason:
            raise RuntimeError(f"worker: {event.message}")
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def load(self) -> int:
        """Tasks under way."""
        with self._lock:
            return len(self._streams)

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def start(self, task: Task) -> "queue.SimpleQueue[Event]":
        stream: "queue.SimpleQueue[Event]" = queue.SimpleQueue()
        with self._lock:
            self._streams[task.number] = stream
            self.served += 1
        self.inbox.put(task)
        return stream

    def forget(self, number: int) -> None:
        """A task has ended, or is not wanted any more."""
        with self._lock:
            wanted = self._streams.pop(number, None)
        if wanted is not None:
            self.inbox.put(number)

    def close(self) -> None:
        self.inbox.put(None)
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()

    def _read(self) -> None:
        while True:
            try:
                event = self._outbox.get(timeout=LOOK_S)
            except queue.Empty:
                if self.alive:
                    continue
                self._end_all()
                return
            with self._lock:
                stream = self._streams.get(event.number)
            if stream is not None:
                stream.put(event)

    def _end_all(self) -> None:
        with self._lock:
            streams = dict(self._streams)
        for number, stream in streams.items():
            stream.put(Event(number, reason="error", message="the worker has ended"))


class Pool:
    """Workers behind one attention server. Thread-safe."""

    def __init__(self, target: str, workers: int) -> None:
        """Starts them. RuntimeError if one does not come up."""
        self._workers: List[_Handle] = [_Handle(target) for _ in range(workers)]
        self._lock = threading.Lock()
        self._next = 0
        try:
            for handle in self._workers:
                handle.wait_ready()
        except RuntimeError:
            self.close()
            raise

    def new_number(self) -> int:
        """Of a task."""
        with self._lock:
            self._next += 1
            return self._next

    def run(self, task: Task) -> Iterator[Event]:
        """Events until each choice has ended, or an error. Busy if no worker takes it. Closing the
        iterator cancels the task."""
        with self._lock:
            ready = [handle for handle in self._workers
                     if handle.alive and handle.load < TASKS_MAX]
            if not ready:
                raise Busy
            chosen = min(ready, key=lambda handle: (handle.load, handle.served))
            stream = chosen.start(task)
        return self._events(chosen, task, stream)

    def served(self) -> List[int]:
        """Tasks that each worker has had."""
        return [handle.served for handle in self._workers]

    def close(self) -> None:
        """Ends the workers."""
        for handle in self._workers:
            handle.close()

    @staticmethod
    def _events(handle: _Handle, task: Task,
                stream: "queue.SimpleQueue[Event]") -> Iterator[Event]:
        left = task.choices
        try:
            while left:
                event: Optional[Event] = stream.get()
                yield event
                left -= event.reason in ("stop", "length")
                if event.reason == "error":
                    return
        finally:
            handle.forget(task.number)
