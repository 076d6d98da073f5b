"""Going on with a sequence whose server has failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, List, NamedTuple, Optional, Set

from mla_client import errors
from mla_client.cluster.moves import model_there
from mla_client.cluster.placement import IMPOSSIBLE, Choice
from mla_client.moves import MOST_MOVES
from mla_client.service import Model, Sequence
from mla_client.types import Prefix

if TYPE_CHECKING:
    from mla_client.cluster.client import ClusterClient

# Rows of a peer come over the network: seconds for each row, and seconds for each attempt.
FETCH_ROW_S = 30e-6
FETCH_S = 0.05
# A server that does not answer for so long is taken for dead.
ALIVE_S = 1.0
# Servers that are asked for a checkpoint.
MOST_RESTORES = 4


class Recovery(NamedTuple):
    """How a sequence was recovered."""

    # "alive": its server has it as before; "moved": a drain has moved it; "checkpoint"; "peer":
    # rows that another server had; "none": all rows are to be sent again.
    how: str
    address: str
    rows: int  # that it has
    lost: int  # that it had before and has not now


def recover(cluster: "ClusterClient", sequence: Sequence, prefix: Optional[Prefix]) -> Recovery:
    """See ClusterClient.recover."""
    before = sequence.length
    silent: Set[str] = set()  # servers that were asked and did not answer
    for how, way in (("alive", _alive), ("moved", _moved), ("checkpoint", _checkpoint)):
        found = way(cluster, sequence, silent)
        if found:
            return Recovery(how, found, sequence.length, max(0, before - sequence.length))
    owner = cluster.owners.of(sequence) or cluster.owners.before(sequence)
    _forget(cluster, sequence)
    address = _open_again(cluster, sequence, prefix, owner.address if owner is not None else "")
    return Recovery("peer" if sequence.length else "none", address, sequence.length,
                    max(0, before - sequence.length))


def _alive(cluster: "ClusterClient", sequence: Sequence, silent: Set[str]) -> str:
    """A server to which calls have just failed is asked as well: the network may be back."""
    connected = cluster.owners.of(sequence)
    owner = connected or cluster.owners.before(sequence)
    if owner is None:
        return ""
    name = sequence.model.spec.model_id
    if cluster.owners.probe([owner.address], name, Prefix(), ALIVE_S)[owner.address] is None:
        silent.add(owner.address)
        return ""
    try:
        if connected is None:  # it was away for a while, and may still be the same process
            return _take(cluster, sequence, owner.address)
        sequence.refresh()  # it follows where the server itself says that it has moved
    except errors.MlaError as error:
        owner.failed(error)
        return ""
    return cluster.address_of(sequence)


def _moved(cluster: "ClusterClient", sequence: Sequence, _silent: Set[str]) -> str:
    try:
        address = cluster.moved(sequence.id)
        return _take(cluster, sequence, address) if address else ""
    except errors.MlaError:
        return ""  # the registry is away, or the peer: other ways are left


def _take(cluster: "ClusterClient", sequence: Sequence, address: str) -> str:
    """Becomes the sequence at that server, or where a drain has moved it since."""
    for _ in range(MOST_MOVES):
        owner = cluster.owners.at(address)
        try:
            model = model_there(cluster, address, sequence.model)
            _become(sequence, owner.client.attach(model, sequence.id))
            return address
        except (errors.ServerRestarted, errors.AnotherServer) as error:
            owner.failed(error)  # the next connection is to the process that is there now
        except errors.NotFound as error:
            if error.detail.reason != "moved" or not error.detail.peer:
                raise
            address = error.detail.peer
    return ""


def _checkpoint(cluster: "ClusterClient", sequence: Sequence, silent: Set[str]) -> str:
    choices = [one.address for one in _choices(cluster, sequence, None)][:MOST_RESTORES]
    back = [one for one in _back(cluster, sequence, silent) if one not in choices]
    for address in [*back, *choices]:
        owner = cluster.owners.at(address)
        try:
            if "checkpoints" not in owner.client.server_info().capabilities:
                continue
            model = _model_at(cluster, address, sequence)
            restored = owner.client.restore(model, [sequence.id])
        except errors.MlaError as error:
            owner.failed(error)
            continue
        _become(sequence, restored[0])
        return address
    return ""


def _back(cluster: "ClusterClient", sequence: Sequence, silent: Set[str]) -> List[str]:
    """Servers that have failed lately and answer: one that was started again has its
    checkpoints."""
    try:
        members = cluster.members.all()
    except errors.MlaError:
        return []
    failed = [one.address for one in members
              if not one.draining and one.address not in silent
              and not cluster.owners.at(one.address).well][:MOST_RESTORES]
    answers = cluster.owners.probe(failed, sequence.model.spec.model_id, Prefix(), ALIVE_S)
    return [address for address in failed if answers[address] is not None]


def _open_again(cluster: "ClusterClient", sequence: Sequence, prefix: Optional[Prefix],
                last: str) -> str:
    """From rows of a peer, or from nothing. The server that had it last, if it is there again or
    still, may have its rows in its cache."""
    choices = _choices(cluster, sequence, prefix, last)
    best = next((one for one in choices if one.cost_s < IMPOSSIBLE), None)
    if best is not None and prefix is not None:
        holder = max(choices, key=lambda one: one.probe.rows if one.probe is not None else 0)
        more = ((holder.probe.rows if holder.probe is not None else 0)
                - (best.probe.rows if best.probe is not None else 0))
        saves = more * (cluster.costs.prefill_row_s - FETCH_ROW_S) - FETCH_S
        if saves > 0 and _fetch(cluster, sequence, prefix, holder.address, best.address):
            return best.address
    known = cluster.models_known.get(sequence.model.spec.model_id)
    if known is None:
        raise errors.NotFound(f"model {sequence.model.spec.model_id} is not the cluster's",
                              errors.ErrorDetail(reason="model_not_found"))
    _become(sequence, known.open_sequence(prefix=prefix))
    return cluster.address_of(sequence)


def _fetch(cluster: "ClusterClient", sequence: Sequence, prefix: Prefix, holder: str,
           destination: str) -> bool:
    """Brings the rows that `holder` has of a prefix to another server. False if it did not work."""
    try:
        there = _model_at(cluster, holder, sequence)
        here = _model_at(cluster, destination, sequence)
        from_client = cluster.owners.at(holder).client
        to_client = cluster.owners.at(destination).client
        with there.open_sequence(prefix=prefix) as source:
            if source.length == 0:
                return False
            imported = to_client.import_rows(here, from_client.export_rows(source))
        try:
            imported.match(prefix)
        except errors.MlaError:
            pass  # nothing is shared with others then; the rows are right all the same
    except errors.MlaError as error:
        cluster.owners.at(holder).failed(error)
        return False
    _become(sequence, imported)
    return True


def _choices(cluster: "ClusterClient", sequence: Sequence, prefix: Optional[Prefix],
             last: str = "") -> List[Choice]:
    known = cluster.models_known.get(sequence.model.spec.model_id)
    return list(cluster.choices(known, prefix, last)) if known is not None else []


def _model_at(cluster: "ClusterClient", address: str, sequence: Sequence) -> Model:
    known = cluster.models_known.get(sequence.model.spec.model_id)
    if known is not None:
        return cluster.model_at(address, known)
    return cluster.owners.at(address).model(sequence.model.spec, 0, {})


def _become(sequence: Sequence, other: Sequence) -> None:
    sequence.model, sequence.id = other.model, other.id
    sequence.epoch, sequence.length = other.epoch, other.length
    sequence.matched, sequence._said = other.matched, other._said
    sequence.released = False


def _forget(cluster: "ClusterClient", sequence: Sequence) -> None:
    """Its server, if it is there after all, need not keep it until the lease ends."""
    owner = cluster.owners.of(sequence)
    if owner is None or not owner.well:
        return
    try:
        owner.client._release([sequence.id])
    except errors.MlaError:
        pass  # the lease does
