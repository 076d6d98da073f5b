"""Sequences of one step on one server, after a drain has moved some of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Sequence as Seq

from mla_client import errors

if TYPE_CHECKING:
    from mla_client.service import Model, Sequence

GATHER_PAUSE_S = 0.1  # between two looks at sequences of which some have not moved yet
# Reason of the error where sequences of a cluster's step are on several servers.
APART = "moved_apart"


def _open_again(sequence: Sequence, model: Model) -> None:
    """Makes a sequence without rows one of the model's server."""
    if sequence.model.service is model.service:
        return
    there = model.open_sequence()
    try:
        sequence.model.service._release([sequence.id])
    except errors.MlaError:
        pass  # its server ends, or its lease does
    sequence.model, sequence.id, sequence.epoch = there.model, there.id, there.epoch


def gather(sequences: Seq[Sequence], deadline: float) -> None:
    """Waits until all sequences are on one server, and makes them objects of that server.
    FailedPrecondition if some stay elsewhere; in a cluster, whose drains have many targets, it
    comes at once, with reason APART. Sequences without rows do not move: new ones are opened in
    their place on the server of the others.
    """
    while True:
        for sequence in sequences:
            sequence.model.service._look(sequence)
        filled = [sequence for sequence in sequences if sequence.length > 0]
        for sequence in sequences:
            if filled and sequence.length == 0:
                _open_again(sequence, filled[0].model)
        services = {id(sequence.model.service) for sequence in sequences}
        if len(services) == 1:
            return
        if not all(sequence.model.service._gathers for sequence in sequences):
            raise errors.FailedPrecondition(
                f"step: a drain has moved its {len(sequences)} sequences to {len(services)} "
                "servers: begin a step of the cluster's client",
                errors.ErrorDetail(field="sequences", reason=APART))
        if time.monotonic() + GATHER_PAUSE_S > deadline:
            raise errors.FailedPrecondition(
                f"step: its {len(sequences)} sequences are on {len(services)} servers, as a drain "
                "has moved some and not others")
        time.sleep(GATHER_PAUSE_S)
