"""Prefixes without a row to take, such as Prefix(prompt, max_rows=len(prompt) - 1) with a prompt of
one token."""

import secrets
import unittest

import mla_client
import numpy as np
import server_binary
from mla_client import Geometry, InvalidArgument, ModelSpec, Prefix, PrefixMatch, Profile
from mla_client.pages import HintKind

GEOMETRY = Geometry(2, 32, 16)
PAGE = 4
SERVER = None


def setUpModule():
    global SERVER
    SERVER = server_binary.start()


def tearDownModule():
    SERVER.stop()


class ShortPromptsTest(unittest.TestCase):
    def setUp(self):
        self.client = mla_client.Client.connect(SERVER.target, timeout_s=60.0,
                                                shared_bytes=1 << 20)
        self.addCleanup(self.client.close)
        self.model = self.client.register_model(
            ModelSpec("short-" + secrets.token_hex(4), GEOMETRY, 1, 0.1, PAGE))

    def add(self, sequence, rows):
        with self.client.step([(sequence, rows)]) as step:
            step.attend(0, None, np.ones((rows, 48)), Profile.APPEND_ONLY)

    def open(self, tokens, **options):
        return self.model.open_sequence(prefix=Prefix(tokens, **options))

    def test_the_idiom(self):
        prompt, answer = [42], [7, 8, 9]
        for turn in range(3):
            sequence = self.open(prompt, max_rows=len(prompt) - 1)
            self.assertEqual((sequence.length, sequence.matched), (0, PrefixMatch()))
            self.add(sequence, len(prompt) - sequence.length)  # there is one to compute
            self.add(sequence, len(answer))
            sequence.match(Prefix(answer), first_row=len(prompt))
            self.assertEqual(sequence.refresh().declared, 4)
            sequence.release()
            with self.open([*prompt, *answer]) as found:
                self.assertEqual(found.matched, PrefixMatch(4, "all"), turn)
        self.assertEqual(self.open(prompt).length, 1)
        self.assertEqual(self.open(prompt, max_rows=1).length, 1)

    def test_what_was_said_before_counts_until_it_is_cut(self):
        self.open([1, 2, 3, 4]).release()
        sequence = self.open([1, 2, 3, 4], max_rows=0)
        self.add(sequence, 3)
        child = sequence.fork(2)
        child.match(Prefix([9]), first_row=2)
        self.assertEqual(child.refresh().declared, 3)
        with self.assertRaises(mla_client.MlaError):
            sequence.fork(2).match(Prefix([9]), first_row=3)  # row 2 was said of the parent's
        sequence.truncate(1)
        with self.assertRaises(mla_client.MlaError):
            sequence.match(Prefix([9]), first_row=2)
        sequence.match(Prefix([9]), first_row=1)
        self.assertEqual(sequence.refresh().declared, 2)
        # Once the declaration was sent, the server checks against it.
        with self.assertRaises(mla_client.FailedPrecondition):
            sequence.match(Prefix([5, 9]), first_row=0)

    def test_a_match_of_no_more_rows_than_there_are(self):
        with self.open([1, 2, 3, 4, 5]) as first:
            self.add(first, 5)
        sequence = self.model.open_sequence()
        self.assertEqual(sequence.match(Prefix([1, 2, 3], max_rows=0)), PrefixMatch())
        self.assertEqual((sequence.length, sequence.refresh().declared), (0, 0))
        self.assertEqual(sequence.match(Prefix([4, 5], max_rows=0), first_row=3), PrefixMatch())
        self.assertEqual(sequence.match(Prefix([6]), first_row=5).rows, 5)
        other = self.open([1, 2, 3, 4, 5], max_rows=4)
        for most in (0, 1, 4):
            self.assertEqual(other.match(Prefix([1, 2, 3, 4, 5], max_rows=most)).rows, 0)
            self.assertEqual(other.length, 4)
        with self.assertRaisesRegex(InvalidArgument, "max_rows"):
            # Earlier declarations to the server cannot be extended silently.
            nothing = self.model.open_sequence(prefix=Prefix([70, 71]))
            nothing.match(Prefix([72], max_rows=0), first_row=2)

    def test_keys_of_pages(self):
        keys = [bytes([number]) * 32 for number in range(3)]
        with self.model.open_sequence(prefix=Prefix(page_keys=keys)) as first:
            self.add(first, 3 * PAGE)
        sequence = self.model.open_sequence(prefix=Prefix(page_keys=keys[:1], max_rows=0))
        self.assertEqual(sequence.length, 0)
        self.assertEqual(sequence.match(Prefix(page_keys=keys[1:]), first_row=PAGE).rows, 3 * PAGE)

    def test_what_is_no_bound(self):
        for wrong in (-1, 2**64):
            with self.assertRaisesRegex(InvalidArgument, "prefix.max_rows"):
                self.open([1, 2], max_rows=wrong)
        for wrong in (-1, 0):
            with self.assertRaisesRegex(InvalidArgument, "prefix.max_rows"):
                self.client.hint(HintKind.RETAIN, (self.model, Prefix([1], max_rows=wrong)))

    def test_in_this_process(self):
        with mla_client.LocalReference() as service:
            model = service.register_model(ModelSpec("local", GEOMETRY, 1, 0.1, PAGE))
            sequence = model.open_sequence(prefix=Prefix([42], max_rows=0))
            self.assertEqual((sequence.length, sequence.match(Prefix([1]), 1).rows), (0, 0))


if __name__ == "__main__":
    unittest.main()
