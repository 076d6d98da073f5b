"""A client of all servers of a cluster, with the methods of a client of one."""

from __future__ import annotations

import random
import secrets
import time
from typing import (Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional,
                    Sequence as Seq, Tuple)

import numpy.typing as npt

from mla_client import errors
from mla_client.cluster import placement
from mla_client.cluster.members import Member, MemberList
from mla_client.cluster.model import ClusterModel
from mla_client.cluster.moves import ClusterMoves
from mla_client.cluster.owners import AWAY, Marks, Owner, Owners
from mla_client.cluster.placement import Choice, Costs
from mla_client.cluster.recovery import Recovery, recover
from mla_client.cluster.step import ClusterStep, OwnedStep
from mla_client.service import Model, Sequence
from mla_client.service.step import Step
from mla_client.types import Buffers, ModelSpec, Prefix, PrefixMatch, Profile, SequenceState

# Servers that one worker uses: a server has no more connections than its share of the workers.
SUBSET = 8
MOST_TRIED = 16  # servers for a new sequence, the probed ones included
GONE_S = 0.5     # how long a server that has left the registry may take to answer


class FleetStats(NamedTuple):
    """Some of the numbers of Admin.GetStats, of several servers."""

    kv_bytes_total: int = 0
    kv_bytes_used: int = 0
    page_groups_used: int = 0
    page_groups_cached: int = 0
    sequences: int = 0


class ClusterStream:
    """A stream on each server, opened where a step needs it first. For a tensor-parallel rank."""

    def __init__(self) -> None:
        self._streams: Dict[int, Tuple[Any, Any]] = {}  # by client, which is kept

    def of(self, client: Any) -> Any:
        """The stream on that server; another one if it broke."""
        known = self._streams.get(id(client))
        if known is None or known[1].broken is not None:
            # Streams to servers that have restarted, or left, free their memory here.
            self._streams = {key: one for key, one in self._streams.items()
                             if one[1].broken is None}
            known = self._streams[id(client)] = (client, client.open_stream())
        return known[1]

    def close(self) -> None:
        """Ends all of them."""
        streams, self._streams = self._streams, {}
        for _, stream in streams.values():
            stream.close()


class ClusterClient:
    """Close it, or use it in a `with` block. Threading: as Client.

    Sequences, and steps of sequences that one server has, are that server's own: between them and
    it nothing of this is in the way."""

    def __init__(self, members: MemberList, connect: Callable[[Member], Any], *,
                 client_id: str = "", timeout_s: float = 30.0, home: str = "",
                 costs: Costs = Costs(), moved: Callable[[int], str] = lambda sequence_id: "",
                 on_peer: Optional[Callable[[Model], None]] = None,
                 subset: int = SUBSET, rng: Optional[random.Random] = None, threads: int = 8,
                 now: Callable[[], float] = time.monotonic,
                 on_close: Callable[[], None] = lambda: None) -> None:
        """Takes over the members. `connect` makes a client of one; `home` is the address of the
        server for sequences that share nothing ("": by the client_id); `moved` asks the registry
        where a drain has moved a sequence; `on_peer` gets each Model before it is used on a server;
        `subset`: servers that this worker uses as long as they have room, 0: all; `threads` 0:
        nothing is done in other threads."""
        self.client_id = client_id or "py-" + secrets.token_hex(8)
        self.timeout_s = timeout_s
        self.members = members
        self.costs = costs
        self.moved = moved
        self.owners = Owners(self._connected(connect), self._prepare, now=now, threads=threads)
        self.models_known: Dict[str, ClusterModel] = {}
        self._home = home
        self._subset = subset
        self._on_peer = on_peer
        self._prepares: Dict[str, Callable[[Model], None]] = {}
        self._rng = rng or random.Random()
        self._marks = Marks()
        self._on_close = on_close
        self.counts = {"opened": 0, "asked": 0, "spilled": 0, "recovered": 0}

    def __enter__(self) -> "ClusterClient":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ClusterClient {self.client_id!r}, {len(self.owners.all())} servers used>"

    def close(self) -> None:
        """Ends all connections. Sequences stay until their leases end."""
        self.members.close()
        self.owners.close()
        self._on_close()

    # --- Servers

    def usable(self) -> List[Member]:
        """Returns the members that take new sequences and have not failed recently. Raises
        Unavailable if there are none."""
        members = self.members.all()
        self.owners.know(members)
        taking = [one for one in members if not one.draining]
        well = [one for one in taking if self.owners.at(one.address).well]
        if not well and not taking:
            raise errors.Unavailable(
                f"the cluster has no server that takes sequences: {len(members)} members, all of "
                "which drain", errors.ErrorDetail(reason="no_servers"))
        return well or taking

    @property
    def home(self) -> str:
        """The address of this worker's home: fixed, or by its client_id among the members."""
        usable = [one.address for one in self.usable()]
        if self._home in usable:
            return self._home
        return placement.subset_of(self.client_id, usable, 1)[0]

    def gone(self, addresses: Seq[str]) -> None:
        """Handles members that have left the registry, or have restarted. Each is asked itself; one
        that does not answer is given up, so that steps that wait for it end at once.
        """
        now = {one.address: one.boot_id for one in self.members.all()}
        for address in addresses:
            owner = self.owners.at(address)
            client = owner.connected
            # A server that restarted can be connected again before the registry lists its new boot.
            if client is None or (now.get(address) and now[address] == client.boot_id):
                continue
            if self.owners.probe([address], "", Prefix(), GONE_S)[address] is None:
                owner.drop()

    def address_of(self, sequence: Sequence) -> str:
        """Returns the server that has a sequence; "" if its connection was given up."""
        owner = self.owners.of(sequence)
        return owner.address if owner is not None else ""

    def outlives(self, error: errors.MlaError) -> bool:
        """Returns true for the error of one server, after which this client can be used as
        before."""
        return error.detail.reason not in ("registry_away", "no_servers", "forked")

    # --- Models and sequences

    def register_model(self, spec: ModelSpec, *, lease_ms: int = 0, kv_scales: Seq[float] = (),
                       sinks: Any = ()) -> ClusterModel:
        """Registers a model as Client does: on the home now, and on other servers when sequences of
        it come there. A repeat renews its lease on all servers that have it."""
        given = {"kv_scales": kv_scales, "sinks": sinks}
        extras: Dict[str, Any] = {name: one for name, one in given.items() if len(one) > 0}
        last: Optional[errors.MlaError] = None
        known = self.models_known.get(spec.model_id)
        again = known is not None and spec in (known.asked, known.spec)
        newest = known.merged(lease_ms, extras) if known and again else (lease_ms, extras)
        for address in self._some_servers():
            owner = self.owners.at(address)
            try:
                there = owner.reach(lambda on: on.renew(spec, lease_ms, extras, newest) if again
                                    else on.model(spec, *newest))
            except AWAY as error:
                owner.failed(error)
                last = error
                continue
            model = ClusterModel(self, spec, there, *newest)
            if known is not None and (again or known.spec == model.spec):
                model.take_uploads(known, extras)
            self.models_known[spec.model_id] = model
            if again:
                model.renew_elsewhere(owner, lease_ms, extras)
            return model
        assert last is not None
        raise last

    def open_sequence(self, model: ClusterModel, request_id: str, lease_ms: int,
                      prefix: Optional[Prefix], last: str) -> Sequence:
        """Places a sequence; see ClusterModel.open_sequence."""
        tried: List[str] = []
        error: Optional[errors.MlaError] = None
        for choice in self.choices(model, prefix, last):
            if len(tried) >= MOST_TRIED:
                break
            tried.append(choice.address)
            owner = self.owners.at(choice.address)
            try:
                sequence = owner.reach(
                    lambda on: on.open_sequence((model.spec, model.lease_ms, model.extras),
                                                request_id, lease_ms, prefix),
                    model.spec.model_id)
            except (errors.ResourceExhausted, errors.Unavailable, errors.DeadlineExceeded,
                    errors.NotFound) as failure:
                owner.failed(failure)
                error = failure
                continue
            self.counts["opened"] += 1
            self.counts["spilled"] += len(tried) > 1
            if prefix is not None:
                self._marks.remember(model.spec.model_id, prefix, choice.address)
            return sequence
        if error is not None:
            raise error
        raise errors.Unavailable("no server of the cluster was found to try",
                                 errors.ErrorDetail(reason="no_servers"))

    def _open(self, model_id: str, request_id: str, lease_ms: int,
              prefix: Optional[Prefix]) -> Tuple[SequenceState, PrefixMatch]:
        """For who hands the sequence over to another process (Model.adopt_sequence)."""
        known = self.models_known.get(model_id)
        if known is None:
            raise errors.NotFound(f"model {model_id} is not the cluster's",
                                  errors.ErrorDetail(reason="model_not_found"))
        made = self.open_sequence(known, request_id or secrets.token_hex(16), lease_ms, prefix, "")
        return SequenceState(made.id, made.epoch, made.length, model_id=model_id), made.matched

    def _hand_over(self, sequence_id: int) -> None:
        for owner in self._used():
            owner.client._hand_over(sequence_id)

    def stats(self) -> FleetStats:
        """Returns sums over the servers that this worker uses, as far as they answer."""
        total = FleetStats()
        for address in placement.subset_of(self.client_id, [one.address for one in self.usable()],
                                           self._subset):
            owner = self.owners.at(address)
            try:
                one = owner.client.stats()
            except (errors.Unavailable, errors.DeadlineExceeded, errors.NotFound) as error:
                owner.failed(error)
                continue
            total = FleetStats(*(mine + getattr(one, name) for name, mine
                                 in zip(FleetStats._fields, total)))
        if total.kv_bytes_total == 0:
            raise errors.Unavailable("no server of the cluster answers",
                                     errors.ErrorDetail(reason="no_servers"))
        return total

    def choices(self, model: ClusterModel, prefix: Optional[Prefix],
                last: str = "") -> Iterator[Choice]:
        """Yields servers for a sequence with this prefix: first the servers that were asked and can
        take it, the cheapest first, then others in the order of the prefix's hash."""
        members = self.usable()
        everyone = [one.address for one in members]
        fills = self.owners.fills(members)
        addresses = placement.subset_of(self.client_id, everyone, self._subset)
        home = self.home
        said = prefix is not None and (len(prefix.token_ids) > 0 or len(prefix.page_keys) > 0)
        key = placement.key_of(model.spec.model_id, prefix) if said and prefix else None
        if said and prefix is not None and last not in everyone:
            last = self._marks.recall(model.spec.model_id, prefix)
        if key is None and not last and home in placement.bounded(addresses, fills):
            yield Choice(home, 0.0, None)  # there is nothing to ask
            addresses = [one for one in addresses if one != home]
        if last in everyone and last not in addresses:
            addresses = [*addresses, last]
        wanted = placement.candidates(key, addresses, fills, self._rng, last, home)
        self.counts["asked"] += len(wanted)
        answers = self.owners.probe(wanted, model.spec.model_id, prefix or Prefix())
        rows = model.rows_of(prefix)
        sizes = {address: model.bytes_of(rows - (probe.rows if probe is not None else 0))
                 for address, probe in answers.items()}
        ranked = placement.ranked(answers, rows, sizes, self.costs, home)
        good = [choice for choice in ranked if choice.cost_s < placement.IMPOSSIBLE]
        yield from good
        for some in (addresses, everyone):
            for address in placement.by_hash(key or b"", some):
                if address not in answers and (some is addresses or address not in addresses):
                    yield Choice(address, placement.IMPOSSIBLE, None)
        # Nothing is known to be better than what had no room a moment ago.
        yield from (choice for choice in ranked if choice not in good)

    def recover(self, sequence: Sequence, prefix: Optional[Prefix] = None) -> Recovery:
        """Goes on with a sequence whose server has failed, drained or restarted: the object is the
        same, its server, id, epoch and length may be others. `prefix` says what its rows stand
        for, as far as the caller knows. Rows beyond `sequence.length` are to be sent again.

        In this order: where it was, where a drain has moved it, from its checkpoint, from rows of a
        peer, from nothing."""
        found = recover(self, sequence, prefix)
        self.counts["recovered"] += 1
        return found

    def step(self, rows: Seq[Tuple[Sequence, int]], *, participants: int = 1, lease_ms: int = 0,
             step_id: Optional[int] = None, stream: Optional[ClusterStream] = None,
             partial: bool = False, rotations: Optional[npt.NDArray] = None) -> Step:
        """Makes a step as Client does. If the sequences have several owners, it is a step on each
        of them: see ClusterStep for `partial`. If they have one, it is that server's own step.
        """
        if not rows:
            raise errors.InvalidArgument("step: needs at least one sequence")
        owner = rows[0][0].model.service

        def stream_of(service: Any) -> Any:
            return None if stream is None else stream.of(service)
        one = all(sequence.model.service is owner for sequence, _ in rows)
        kind = OwnedStep if one else ClusterStep
        return kind(owner, rows, participants, lease_ms, step_id, stream_of, partial,
                    rotations)

    def open_stream(self) -> ClusterStream:
        """Opens a stream on every server that steps use."""
        return ClusterStream()

    def buffers(self, model: Model, rows: int, profile: Profile = Profile.EXPANDED, *,
                stream: Optional[ClusterStream] = None, **options: Any) -> Buffers:
        """Returns buffers as Client does, in memory of the home: steps there use them in place,
        steps elsewhere send them.
        """
        client = self.owners.at(self.home).client
        buffers: Buffers = client.buffers(model, rows, profile,
                                          stream=None if stream is None else stream.of(client),
                                          **options)
        return buffers

    def attach(self, model: ClusterModel, sequence_id: int, *, lease_ms: int = 0) -> Sequence:
        """Returns a sequence that is already open on some server. NotFound if none has it."""
        return self._where(model, lambda there: _service_of(there).attach(there, sequence_id,
                                                                          lease_ms=lease_ms))

    def adopt(self, model: ClusterModel, sequence_id: int) -> Sequence:
        """See Model.adopt_sequence."""
        return self._where(model, lambda there: there.adopt_sequence(sequence_id))

    def sequences(self) -> List[SequenceState]:
        """Returns this client's open sequences, on all servers that it has used."""
        return [one for owner in self._used() for one in owner.client.sequences()]

    # --- Rows out and in, each by the server that has the sequence

    def export_rows(self, sequence: Sequence, first_row: int = 0,
                    end_row: Optional[int] = None) -> Iterator[bytes]:
        """Exports rows as Client does."""
        rows: Iterator[bytes] = _service(sequence).export_rows(sequence, first_row, end_row)
        return rows

    def import_rows(self, model: ClusterModel, parts: Iterable[bytes], *,
                    behind: Optional[Sequence] = None, lease_ms: int = 0) -> Sequence:
        """Imports rows as Client does; a new sequence belongs to the home."""
        if behind is not None:
            into: Sequence = _service(behind).import_rows(behind.model, parts, behind=behind)
            return into
        there = self.model_at(self.home, model)
        made: Sequence = _service_of(there).import_rows(there, parts, lease_ms=lease_ms)
        return made

    def checkpoint(self, sequences: Seq[Sequence]) -> List[Any]:
        """Makes checkpoints as Client does, on each owner of some of the sequences."""
        groups: Dict[int, List[Sequence]] = {}
        for sequence in sequences:
            groups.setdefault(id(sequence.model.service), []).append(sequence)
        return [one for group in groups.values()
                for one in _service(group[0]).checkpoint(group)]

    def hint(self, kind: int, target: Any, **options: Any) -> Any:
        """Gives a hint as Client does: to a sequence's owner, and for a prefix to the server that
        had it last.
        """
        if isinstance(target, Sequence):
            return _service(target).hint(kind, target, **options)
        model, prefix = target
        address = self._marks.recall(model.spec.model_id, prefix) or self.home
        there = self.model_at(address, model)
        return _service_of(there).hint(kind, (there, prefix), **options)

    # --- Operation

    def server_info(self) -> Any:
        """Returns the info of the first server that answers. The home is asked first."""
        return self._first(lambda client: client.server_info())

    def models(self) -> List[ModelSpec]:
        """Returns the tenant's models, as the first server that answers has them."""
        found: List[ModelSpec] = self._first(lambda client: client.models())
        return found

    @property
    def transport(self) -> str:
        """Says how steps travel to the home."""
        name: str = self._first(lambda client: client.transport)
        return name

    @property
    def lease_error(self) -> Optional[errors.MlaError]:
        """Says why a renewal of leases failed the last time, on any server; None if none did."""
        return next((one.connected.lease_error for one in self._used()
                     if one.connected is not None and one.connected.lease_error), None)

    def renew_leases(self, lease_ms: int = 0) -> int:
        """Renews leases as Client does, on all servers that were used; returns the number of
        sequences. Raises the first error after all were asked."""
        renewed, error = self.owners.each(lambda client: client.renew_leases(lease_ms))
        if error is not None:
            raise error
        return sum(renewed)

    def model_at(self, address: str, model: ClusterModel) -> Model:
        """Returns the model as a server has it."""
        return self.owners.at(address).model(model.spec, model.lease_ms, model.extras)

    # --- For adapters and moves

    def _prepare_moved(self, model_id: str, prepare: Callable[[Model], None]) -> None:
        self._prepares[model_id] = prepare

    def _unregister(self, model_id: str) -> None:
        self.models_known.pop(model_id, None)
        refused: Optional[errors.MlaError] = None
        for owner in self._used():
            owner.forget_model(model_id)
            try:
                owner.client._unregister(model_id)
            except errors.NotFound:
                pass  # it was not there
            except errors.MlaError as error:
                refused = error  # the others need not keep it for that
        if refused is not None:
            raise refused

    def _release(self, sequence_ids: List[int]) -> List[int]:
        """Returns the ids that no server had. Raises the first error if one may have them."""
        found, error = self.owners.each(lambda client: client._release(sequence_ids))
        absent = [one for one in sequence_ids if all(one in missing for missing in found)]
        if absent and error is not None:
            raise error
        return absent

    def _prepare(self, there: Model) -> None:
        known = self.models_known.get(there.spec.model_id)
        if known is not None:
            known.replay(there)
        for prepare in (self._prepares.get(there.spec.model_id), self._on_peer):
            if prepare is not None:
                prepare(there)

    def _connected(self, connect: Callable[[Member], Any]) -> Callable[[Member], Any]:
        def made(member: Member) -> Any:
            client = connect(member)
            client._moves = ClusterMoves(self)
            client._gathers = False
            return client
        return made

    def _used(self) -> List[Owner]:
        return [one for one in self.owners.all() if one.connected is not None]

    def _some_servers(self) -> List[str]:
        home = self.home
        others = [one.address for one in self.usable() if one.address != home]
        return [home, *self._rng.sample(others, min(len(others), MOST_TRIED - 1))]

    def _first(self, act: Callable[[Any], Any]) -> Any:
        last: Optional[errors.MlaError] = None
        for address in self._some_servers():
            owner = self.owners.at(address)
            try:
                return owner.reach(lambda on: act(on.client))
            except AWAY as error:
                owner.failed(error)
                last = error
        assert last is not None
        raise last

    def _where(self, model: ClusterModel, act: Callable[[Model], Sequence]) -> Sequence:
        last: errors.MlaError = errors.NotFound("no server of the cluster has the sequence",
                                                errors.ErrorDetail(reason="sequence_not_found"))
        for member in self.members.all():
            owner = self.owners.at(member.address)
            if not owner.well:
                continue
            try:
                return owner.reach(lambda on: act(self.model_at(on.address, model)))
            except AWAY as error:
                owner.failed(error)
            except errors.NotFound as error:
                last = error
        raise last


def _service(sequence: Sequence) -> Any:
    return sequence.model.service


def _service_of(model: Model) -> Any:
    return model.service
