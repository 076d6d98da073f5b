"""The common parts of the adapters of serving engines. They map requests to sequences and passes to
steps, handle prefixes, weights and ranks, and decide what to do when the server is full, away or
new. They import neither an engine nor torch.

    options    what a user says of the server; salts; tables of versions; refusals
    link       a process's way to the server: connecting, registering, both again; room
    admission  the scheduler's side: room, prefixes, plans
    passes     the worker's side: passes as steps
    plan       values that travel from one to the other
    blocks     which rows of a batch are whose, by the blocks that they are written to
    layers     the attention layers of a process, and their weights
    worker     what one process has of a server; requests where that process schedules, too
    batch      rows of a tensor's kind, with padding and beams, as sequences and steps
    states     the states of a request, and the moves between them
    faults     what a failed call means
"""

from mla_client.serving.admission import Admission, Policy
from mla_client.serving.blocks import BatchPlan, Given, LostBlocks, Orders, Planner
from mla_client.serving.faults import Fault, Pause, fault_of
from mla_client.serving.layers import Layers
from mla_client.serving.link import Link
from mla_client.serving.options import (Options, Release, check_version, options_in, refuse,
                                        salt_of, salt_of_rows)
from mla_client.serving.passes import Passes
from mla_client.serving.plan import How, Part, Pass, PassPlan, Ranks, Scheduled
from mla_client.serving.states import Event, Request, State
from mla_client.serving.worker import Requests, Worker, agreed

__all__ = ["Admission", "BatchPlan", "Event", "Fault", "Given", "How", "Layers", "Link",
           "LostBlocks", "Options", "Orders", "Part", "Pass", "PassPlan", "Passes", "Pause",
           "Planner", "Policy", "Ranks", "Release", "Request", "Requests", "Scheduled", "State",
           "Worker", "agreed", "check_version", "fault_of", "options_in", "refuse", "salt_of",
           "salt_of_rows"]
