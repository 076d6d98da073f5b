"""The common parts of the adapters of serving engines. They map requests to sequences and passes to
steps, handle prefixes, weights and ranks, and decide what to do when the server is full, away or
new. They import neither an engine nor torch.

    options    what a user says of the server; salts; tables of versions
    link       a process's way to the server: connecting, registering, both again
    admission  the scheduler's side: room, prefixes, plans
    passes     the worker's side: passes as steps
    plan       values that travel from one to the other
    states     the states of a request, and the moves between them
    faults     what a failed call means
"""

from mla_client.serving.admission import Admission
from mla_client.serving.faults import Fault, Pause, fault_of
from mla_client.serving.link import Link
from mla_client.serving.options import Options, Release, check_version, salt_of
from mla_client.serving.passes import Pass, Passes
from mla_client.serving.plan import How, Part, PassPlan, Ranks, Scheduled
from mla_client.serving.states import Event, Request, State

__all__ = ["Admission", "Event", "Fault", "How", "Link", "Options", "Part", "Pass", "PassPlan",
           "Passes", "Pause", "Ranks", "Release", "Request", "Scheduled", "State", "check_version",
           "fault_of", "salt_of"]
