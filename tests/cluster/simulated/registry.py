"""The registry of a fleet that exists in one thread, under a clock that is moved by hand."""

from mla_client import errors

TTL_S = 4.0


class Registry:
    """Values under leases: what a server that is up has announced goes some seconds after it."""

    def __init__(self, world):
        self.world = world
        self.away = False
        self.values = {}  # address -> value, and when it ends
        self.moved = {}   # sequence id -> address

    def announce(self):
        """All announcers write, as far as they can."""
        if self.away:
            return
        for server in self.world.servers:
            if server.up and not self.world.cut_off(server):
                self.values[server.address] = (server.member(), self.world.now + TTL_S)

    def read(self):
        """The members."""
        if self.away:
            raise errors.Unavailable("the registry is away",
                                     errors.ErrorDetail(reason="registry_away"))
        return [value for value, until in self.values.values() if until >= self.world.now]

    def where(self, sequence_id):
        """A tombstone."""
        if self.away:
            raise errors.Unavailable("the registry is away")
        return self.moved.get(sequence_id, "")
