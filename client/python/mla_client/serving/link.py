"""One process's way to the server: connecting, registering the model with its weights, and doing
both again when the server has restarted, was drained, or is another one; and the room that its pool
has."""

from __future__ import annotations

import logging
import time
from typing import Any, Callable, Iterable, List, Optional, Tuple

import mla_client
from mla_client import errors
from mla_client.serving.faults import FAILURES, Fault, Pause, fault_of
from mla_client.serving.layers import Weights, upload
from mla_client.serving.options import LEASE_MS, MODEL_LEASE_MS, Options
from mla_client.serving.plan import Ranks
from mla_client.service import Model
from mla_client.types import ModelSpec

LOG = logging.getLogger("mla_client")
# An engine that was killed leaves its sequences, and with them its model, until their leases end.
REPLACE_S = LEASE_MS / 1e3 + 5.0
REPLACE_PAUSE_S = 0.5
# The pool's room is asked for again after this long.
ROOM_S = 1.0
# Gives the weights of a layer, of this rank's heads.
WeightsOf = Callable[[int], Weights]


class Link:
    """Belongs to one thread at a time. With `start` it registers the model; a link that was not
    started uses the model that another one has registered."""

    def __init__(self, options: Options, ranks: Ranks = Ranks(), pause: Optional[Pause] = None
                 ) -> None:
        self.options = options
        self.ranks = ranks
        self.client: Any = None
        self.generation = 0  # rises with each connection: what was opened over others is gone
        self._spec: Optional[ModelSpec] = None
        self._weights: Optional[WeightsOf] = None
        self._model: Optional[Model] = None
        self._pause = pause or Pause()
        self._error: Optional[errors.MlaError] = None
        self._target = ""   # of the connection
        self._avoided = ""  # the one that has failed last: it is tried after the others
        self._closed = False

    def look(self) -> Any:
        """Bounds of the first server that answers (mla.v1.Limits). The error of the last one, with
        the address, if none does: call this before a model is loaded."""
        for target in self.options.targets:
            try:
                self._connect(target)
                return self.client.server_info().limits
            except errors.MlaError as error:
                self._drop()
                last = error
        raise type(last)(f"target {', '.join(self.options.targets)}: {last.message}", last.detail)

    def start(self, spec: ModelSpec, weights: Optional[WeightsOf]) -> Model:
        """Registers the model and uploads this rank's weights, now and whenever the server has
        them no longer; `weights` is called for each layer each time."""
        self._spec, self._weights = spec, weights
        model = self.model()
        if self.options.arguments.get("device_bytes"):
            # A server that grants none is refused now, and not pass by pass.
            assert self.client.transport
        return model

    def model(self) -> Model:
        """The model as the server has it. While the server is left alone after a failure, the
        failure again."""
        if self._model is not None:
            return self._model
        if self._closed:
            raise errors.Unavailable("the engine has ended")
        if not self._pause.over and self._error is not None:
            raise self._error.again()
        last: Optional[errors.MlaError] = None
        for target in self._order():
            try:
                if self.client is None:
                    self._connect(target)
                self._model = self._registered()
                self._pause.well()
                self._error = None
                return self._model
            except errors.MlaError as error:
                self._drop()
                last = error
        assert last is not None
        self._note(last)
        raise last

    def failed(self, error: errors.MlaError) -> Fault:
        """Takes note of what a call has raised; says what it means."""
        fault = fault_of(error)
        if self.fleet is not None and self.fleet.outlives(error):
            # One server of many: what it had begins again elsewhere.
            return Fault.LOST if fault == Fault.AWAY else fault
        gone = error.detail.reason in ("model_not_found", "weights_missing")
        if fault == Fault.AWAY or gone:
            if self._model is not None or self.client is not None:
                if error.detail.reason == "draining":
                    self._leave()
                self._drop()
                self._note(error, leave=False)
                if fault == Fault.AWAY:
                    self._avoided = self._target
        elif fault == Fault.OTHER:
            LOG.error("mla: a call was refused: %s", error)
        return fault

    @property
    def fleet(self) -> Any:
        """The client, if its target names a cluster; else None: it is one server's."""
        return self.client if hasattr(self.client, "outlives") else None

    @property
    def absent_s(self) -> float:
        """For how long the server has been away; 0: it is not known to be."""
        return self._pause.lasts_s

    @property
    def patient(self) -> bool:
        """True while requests are to wait for a server that is away."""
        return self.absent_s < self.options.away_s

    @property
    def error(self) -> Optional[errors.MlaError]:
        """Why the server is away."""
        return self._error

    def close(self) -> None:
        """Releases the model, unless others use it or it is to be kept, and ends the connection. A
        link that has found the model does so, too: its reservations may have outlived the other
        one."""
        self._closed = True
        model, self._model = self._model, None
        if model is not None and not self.options.keep_model:
            try:
                model.unregister()
            except errors.MlaError as error:
                LOG.info("mla: model %s stays registered: %s", model.spec.model_id, error)
        self._drop()

    def _order(self) -> List[str]:
        """Where to try: a server that drains names the one to go to, and answers as before."""
        peer = self._error.detail.peer if self._error is not None else ""
        targets = sorted(self.options.targets, key=lambda one: one == self._avoided)
        return [*([peer] if peer else []), *(one for one in targets if one != peer)]

    def _connect(self, target: str) -> None:
        self._drop()
        self._target = target
        self.client = self.options.connect(target)
        self.generation += 1

    def _drop(self) -> None:
        """Ends the connection; its sequences end with their leases."""
        client, self.client, self._model = self.client, None, None
        if client is not None:
            try:
                client.close()
            except FAILURES:
                pass  # it was broken

    def _leave(self) -> None:
        """Gives back what a server that drains still has, so that the drain need not wait for
        leases; not where sequences are followed to where they move."""
        if (self._spec is None or not self.ranks.sends_rows
                or self.options.arguments.get("follow_moves")):
            return
        try:
            held = [one.sequence_id for one in self.client.sequences()]
            if held:
                self.client._release(held)
            mla_client.Model(self.client, self._spec, 0).unregister()
        except FAILURES as error:
            LOG.info("mla: the server that drains keeps some: %s", error)

    def _note(self, error: errors.MlaError, leave: bool = True) -> None:
        """Keeps the error; with `leave` the server is left alone for a while."""
        if self._error is None or str(self._error) != str(error):
            LOG.warning("mla: the server is away: %s", error)
        self._error = error.again()
        if leave:
            self._pause.failed(error.detail.retry_after_ms / 1e3)

    def _registered(self) -> Model:
        if self._spec is None:
            return self._found()
        try:
            model = self._upload()
        except errors.AlreadyExists:
            self._replace()
            model = self._upload()
        except errors.NotFound as error:  # another engine has ended, and has released it
            if error.detail.reason != "model_not_found":
                raise
            model = self._upload()
        self.client._prepare_moved(model.spec.model_id, self._send)
        return model

    def _replace(self) -> None:
        """Unregisters another checkpoint, or shape, of the same name. Waits as long as its
        sequences are open, because the sequences of a killed engine end with their leases.
        FailedPrecondition (model_in_use) if an engine still uses it."""
        assert self._spec is not None
        deadline = time.monotonic() + REPLACE_S
        told = False
        while True:
            try:
                mla_client.Model(self.client, self._spec, 0).unregister()
                return
            except errors.FailedPrecondition as error:
                if error.detail.reason != "model_in_use" or time.monotonic() > deadline:
                    raise
                if not told:
                    LOG.warning("mla: another model %s is in use; waiting up to %.0f s for its "
                                "engine's leases to end: %s", self._spec.model_id, REPLACE_S,
                                error.message)
                    told = True
            time.sleep(REPLACE_PAUSE_S)

    def _upload(self) -> Model:
        assert self._spec is not None
        if self.fleet is not None:  # each server gets the weights when it gets the model
            self.fleet._prepare_moved(self._spec.model_id, self._send)
        model: Model = self.client.register_model(self._spec, lease_ms=MODEL_LEASE_MS)
        if self.fleet is None:
            self._send(model)
        return model

    def _send(self, model: Model) -> None:
        if self._weights is not None:
            upload(model, self._weights, self.ranks)

    def _found(self) -> Model:
        """The model that a worker of this engine has registered."""
        name = self.options.model_id
        for spec in self.client.models():
            if spec.model_id == name:
                model: Model = self.client.register_model(spec, lease_ms=MODEL_LEASE_MS)
                return model
        raise errors.NotFound(f"model {name}: no worker has registered it yet",
                              errors.ErrorDetail(reason="model_not_found"))


def free_groups(stats: Any, model: Model) -> int:
    """Page groups of the model that the pool has room for, cached ones among them. `stats`: as
    Client.stats gives them."""
    total = stats.kv_bytes_total // max(1, model.page_group_bytes)
    return int(total - stats.page_groups_used + stats.page_groups_cached)


class Room:
    """Page groups that were free a moment ago, less those that passes have taken since. Belongs to
    one thread at a time."""

    def __init__(self, link: Link, failed: Callable[[Exception], Any]) -> None:
        """`failed` is told what a call has raised."""
        self._link = link
        self._failed = failed
        self._asked = -ROOM_S
        self._groups = 0

    def take(self, model: Model, lengths: Iterable[int], rows: Iterable[int]) -> bool:
        """Counts the groups that `rows` new rows of sequences of these lengths need as taken.
        Returns True if there is room for them. Asks the server if that was not done lately, or
        there seems to be none."""
        page = model.spec.page_size or 1
        need = 0
        for length, new in zip(lengths, rows):
            need += (length + new - 1) // page - (length - 1) // page
        if need > self._groups or time.monotonic() - self._asked > ROOM_S:
            self._groups = self._free(model)
            self._asked = time.monotonic()
        self._groups -= need
        return self._groups >= 0

    def _free(self, model: Model) -> int:
        """Half of the page groups that the pool has free: others take some, too."""
        try:
            stats = self._link.client.stats()
        except FAILURES as error:
            self._failed(error)
            return 0
        return free_groups(stats, model) // 2
