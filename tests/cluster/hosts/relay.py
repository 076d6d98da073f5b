"""A relay that delays what passes, in both directions.

    relay.py ADDRESS PORT TO_PORT

Listens at ADDRESS:PORT and connects to 127.0.0.1:TO_PORT. Each line of standard input is the delay
from then on, in seconds. Prints "ready" once it listens.
"""

import asyncio
import sys

CHUNK = 1 << 16


class Relay:
    """All connections have the same delay."""

    def __init__(self, to_port):
        self._to_port = to_port
        self._delay = 0.0

    async def connected(self, reader, writer):
        """A connection from outside."""
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pass(reader, back), self._pass(there, writer))

    async def _pass(self, reader, writer):
        try:
            while True:
                chunk = await reader.read(CHUNK)
                if not chunk:
                    break
                if self._delay:
                    await asyncio.sleep(self._delay)
                writer.write(chunk)
                await writer.drain()
        except OSError:
            pass  # one side has gone
        finally:
            writer.close()

    async def obey(self):
        """Takes delays until standard input ends."""
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            self._delay = float(line)


async def main():
    address, port, to_port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    relay = Relay(to_port)
    server = await asyncio.start_server(relay.connected, address, port)
    print("ready", flush=True)
    async with server:
        await relay.obey()


if __name__ == "__main__":
    asyncio.run(main())
