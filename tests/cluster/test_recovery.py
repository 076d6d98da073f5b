"""Recovery with real servers: from a checkpoint, after a restart or at a peer that has a copy, and
from rows that are fetched."""

import pathlib
import shutil
import tempfile
import unittest

from mla_client import Client
from mla_client.cluster.placement import Costs

import real
import server_binary


class RecoveryTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="mla-recovery-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.servers = {}

    def checkpoints(self, name):
        """A folder of checkpoints with the key that all of them have."""
        made = self.folder / name
        made.mkdir(mode=0o700)
        (made / "key").write_bytes(b"k" * 32)
        (made / "key").chmod(0o600)
        return made

    def serve(self, *arguments):
        """The address of a server."""
        server, address = server_binary.start_on_tcp(*arguments)
        self.addCleanup(server.stop)
        self.servers[address] = server
        return address

    def worker(self, addresses, home, **options):
        """A worker with one conversation of one turn."""
        client = Client.connect(",".join(addresses), client_id="worker", timeout_s=real.TIMEOUT_S,
                                cluster={"subset": 0, "home": home, **options})
        self.addCleanup(client.close)
        worker = real.Worker(client, 1)
        conversation = real.Conversation(worker.rng)
        worker.conversations.append(conversation)
        conversation.sequence = worker.model.open_sequence()
        worker.turn(worker.conversations)
        self.assertEqual(client.address_of(conversation.sequence), home)
        return worker, conversation

    def check(self, worker, conversation, how, address):
        """The next turn recovers the sequence in this way, and its outputs are right."""
        worker.turn(worker.conversations)
        self.assertEqual(dict(worker.counts, outputs=0), {how: 1, "outputs": 0})
        self.assertEqual(worker.client.address_of(conversation.sequence), address)
        worker.turn(worker.conversations)
        self.assertEqual(worker.wrong, [])

    def test_a_server_that_was_started_again_restores_its_checkpoint(self):
        peer = self.serve()
        home = self.serve(f"--checkpoint-path={self.checkpoints('home')}")
        worker, conversation = self.worker([peer, home], home)
        sequence = conversation.sequence
        sequence.model.service.checkpoint([sequence])
        saved, name = sequence.length, sequence.id
        worker.turn(worker.conversations)
        self.servers[home].kill()
        self.servers[home].start()
        found = worker.client.recover(sequence, conversation.prefix)
        self.assertEqual((found.how, found.address, found.rows, found.lost, sequence.id),
                         ("checkpoint", home, saved, real.TURN_ROWS, name))
        worker.turn(worker.conversations)
        self.assertEqual(worker.wrong, [])

    def test_a_peer_restores_a_copy_of_the_checkpoint(self):
        at_home, at_peer = self.checkpoints("home"), self.checkpoints("peer")
        peer = self.serve(f"--checkpoint-path={at_peer}")
        home = self.serve(f"--checkpoint-path={at_home}")
        worker, conversation = self.worker([peer, home], home)
        conversation.sequence.model.service.checkpoint([conversation.sequence])
        for tenant in filter(pathlib.Path.is_dir, at_home.iterdir()):
            shutil.copytree(tenant, at_peer / tenant.name, dirs_exist_ok=True)
        self.servers[home].kill()
        self.check(worker, conversation, "checkpoint", peer)

    def test_rows_of_a_peer_are_fetched(self):
        home, holder, empty = (self.serve() for _ in range(3))
        # A row is dear, and a pool with rows in it is dearer.
        worker, conversation = self.worker([home, holder, empty], home,
                                           costs=Costs(prefill_row_s=1.0, full_s=1e9))
        with Client.connect(holder, timeout_s=real.TIMEOUT_S) as other:
            copier = real.Worker(other, 2)
            copy = real.Conversation(copier.rng)
            copy.tokens, copy.rows = list(conversation.tokens), conversation.rows
            for _ in range(3):
                copy.grow(real.TURN_ROWS)
            copy.sequence = copier.model.open_sequence(prefix=copy.prefix)
            rows = [(copy.sequence, copy.missing)]
            with other.step(rows) as step:
                for layer in range(real.LAYERS):
                    step.attend(layer, None, copy.rows[layer], real.Profile.APPEND_ONLY)
            copy.sequence.release()
        self.servers[home].kill()
        found = worker.client.recover(conversation.sequence, copy.prefix)
        self.assertEqual((found.how, found.address), ("peer", empty))
        self.assertGreater(found.rows, real.TURN_ROWS)
        conversation.tokens, conversation.rows = copy.tokens, copy.rows
        worker.turn(worker.conversations)
        self.assertEqual(worker.wrong, [])


if __name__ == "__main__":
    unittest.main()
