"""Where a sequence is to be, by pure functions."""

import collections
import hashlib
import pathlib
import random
import unittest

from mla_client import Prefix, errors
from mla_client.cluster import placement
from mla_client.cluster.placement import Costs, Probe

GOLDEN = pathlib.Path(__file__).resolve().parents[4] / "tests/cluster/placement_golden.txt"
ADDRESSES = [f"server-{number}:50551" for number in range(64)]


def keys(count):
    return [placement.key_of("m", Prefix(range(number, number + 300))) for number in range(count)]


class KeysTest(unittest.TestCase):
    def test_a_key_is_of_the_first_rows_the_model_and_the_salt(self):
        first = list(range(placement.KEY_ROWS))
        key = placement.key_of("m", Prefix([*first, 1]))
        self.assertEqual(key, placement.key_of("m", Prefix([*first, 2, 3])))
        self.assertNotEqual(key, placement.key_of("n", Prefix([*first, 1])))
        self.assertNotEqual(key, placement.key_of("m", Prefix([*first, 1], salt="s")))
        self.assertNotEqual(key, placement.key_of("m", Prefix([9, *first[1:]])))
        names = [bytes([n]) * 16 for n in range(4)]
        self.assertEqual(placement.key_of("m", Prefix(page_keys=names)),
                         placement.key_of("m", Prefix(page_keys=names[:1])))

    def test_page_names_stand_for_all_rows_before(self):
        tokens = list(range(200))
        names = placement.page_names(tokens, 64, b"fleet")
        self.assertEqual([len(name) for name in names], [16, 16, 16])
        self.assertEqual(placement.page_names(tokens[:130], 64, b"fleet"), names[:2])
        self.assertNotEqual(placement.page_names([9, *tokens[1:]], 64, b"fleet")[2], names[2])
        self.assertNotEqual(placement.page_names(tokens, 64, b"other")[0], names[0])
        self.assertEqual(placement.page_names([], 64, b"fleet"), [])


class GoldenTest(unittest.TestCase):
    def test_bytes_are_those_that_the_cpp_client_makes(self):
        def listed(text):
            return text.split(",") if text else []

        def numbers(text):
            return [int(one) for one in listed(text)]

        def hexed(names):
            return ",".join(one.hex() for one in names)
        makers = {
            "key": lambda model, salt, tokens, keys: placement.key_of(model, Prefix(
                numbers(tokens), page_keys=[bytes.fromhex(one) for one in listed(keys)],
                salt=salt)).hex(),
            "order": lambda key, addresses: ",".join(
                placement.by_hash(bytes.fromhex(key), listed(addresses))),
            "subset": lambda worker, addresses, most: ",".join(
                placement.subset_of(worker, listed(addresses), int(most))),
            "hash": lambda key, data, size: hashlib.blake2b(
                bytes.fromhex(data), key=bytes.fromhex(key), digest_size=int(size)).hexdigest(),
            "names": lambda salt, size, tokens: hexed(
                placement.page_names(numbers(tokens), int(size), bytes.fromhex(salt))),
        }
        kinds = set()
        for line in GOLDEN.read_text(encoding="utf-8").splitlines():
            if line.startswith("#"):
                continue
            kind, *given, made = line.split("\t")
            self.assertEqual(makers[kind](*given), made, line)
            kinds.add(kind)
        self.assertEqual(kinds, set(makers))


class HashTest(unittest.TestCase):
    def test_a_server_that_goes_moves_its_own_keys_alone(self):
        for key in keys(200):
            before = placement.by_hash(key, ADDRESSES)
            gone = before[3]
            after = placement.by_hash(key, [one for one in ADDRESSES if one != gone])
            self.assertEqual([one for one in before if one != gone], after)

    def test_keys_are_spread_evenly(self):
        first = collections.Counter(placement.by_hash(key, ADDRESSES)[0] for key in keys(6400))
        self.assertEqual(len(first), 64)
        self.assertLess(max(first.values()), 160)  # of 100, six deviations

    def test_workers_use_the_same_servers_as_members_come_and_go(self):
        subset = placement.subset_of("worker-1", ADDRESSES, 8)
        self.assertEqual(len(subset), 8)
        rest = [one for one in ADDRESSES if one != subset[2]]
        self.assertEqual(placement.subset_of("worker-1", rest, 8)[:7],
                         [one for one in subset if one != subset[2]])
        self.assertEqual(sorted(placement.subset_of("w", ADDRESSES, 0)), sorted(ADDRESSES))
        used = collections.Counter(
            address for number in range(1000)
            for address in placement.subset_of(f"worker-{number}", ADDRESSES, 8))
        self.assertLess(max(used.values()), 200)  # connections of a server


class BoundTest(unittest.TestCase):
    def test_servers_fuller_than_the_bound_are_passed_over(self):
        fills = {address: 0.4 for address in ADDRESSES}
        fills[ADDRESSES[0]] = 0.51
        self.assertNotIn(ADDRESSES[0], placement.bounded(ADDRESSES, fills))
        fills[ADDRESSES[0]] = 0.49
        self.assertEqual(placement.bounded(ADDRESSES, fills), ADDRESSES)

    def test_small_differences_count_for_nothing_where_all_are_empty(self):
        fills = {address: 0.0 for address in ADDRESSES}
        fills[ADDRESSES[0]] = placement.SLACK
        self.assertIn(ADDRESSES[0], placement.bounded(ADDRESSES, fills))
        self.assertEqual(placement.bounded(ADDRESSES, {}), ADDRESSES)
        self.assertEqual(placement.bounded([], {}), [])


class CandidatesTest(unittest.TestCase):
    def test_at_most_four_without_repeats_the_last_owner_first(self):
        for number, key in enumerate(keys(200)):
            rng = random.Random(number)
            last = rng.choice(ADDRESSES)
            chosen = placement.candidates(key, ADDRESSES, {}, rng, last)
            self.assertEqual(chosen[0], last)
            self.assertEqual(len(set(chosen)), len(chosen))
            self.assertIn(len(chosen), (3, 4))
            for address in placement.by_hash(key, ADDRESSES)[:2]:
                self.assertIn(address, chosen)

    def test_the_emptier_of_two_random_ones(self):
        fills = {address: number / 64 for number, address in enumerate(ADDRESSES)}
        drawn = [placement.candidates(None, ADDRESSES, fills, random.Random(seed))[0]
                 for seed in range(400)]
        mean = sum(fills[address] for address in drawn) / 400
        self.assertLess(mean, 0.40)  # of the fuller one, or of one alone, 0.66 and 0.49

    def test_servers_that_are_too_full_get_nothing_new(self):
        """A prompt that many share is found at some servers only, which would have all load."""
        full = set(ADDRESSES[:32])
        fills = {address: 0.9 if address in full else 0.3 for address in ADDRESSES}
        for number, key in enumerate(keys(50)):
            chosen = placement.candidates(key, ADDRESSES, fills, random.Random(number), "",
                                          ADDRESSES[number % 32])
            self.assertEqual(len(chosen), 3)
            self.assertEqual(full & set(chosen), set())
            # They keep the conversations that they have.
            self.assertEqual(placement.candidates(
                key, ADDRESSES, fills, random.Random(number), ADDRESSES[0])[0], ADDRESSES[0])

    def test_a_last_owner_that_is_no_member_is_not_asked(self):
        self.assertNotIn("gone:1", placement.candidates(
            keys(1)[0], ADDRESSES, {}, random.Random(1), "gone:1"))
        self.assertEqual(placement.candidates(None, [], {}, random.Random(1), "gone:1"), [])
        self.assertEqual(placement.candidates(None, ["a:1"], {}, random.Random(1)), ["a:1"])


class CostTest(unittest.TestCase):
    ROOM = {"bytes_free": 1 << 30, "bytes_total": 1 << 31}

    def test_rows_that_are_there_outweigh_a_short_queue_and_no_long_one(self):
        costs = Costs()
        has = Probe(rows_in_pool=1000, wait_s=0.00005, **self.ROOM)
        idle = Probe(**self.ROOM)
        busy = Probe(rows_in_pool=1000, wait_s=0.0005, **self.ROOM)
        price = [placement.cost(one, 1000, 0, costs, False) for one in (has, idle, busy)]
        self.assertLess(price[0], price[1])
        self.assertGreater(price[2], price[1])

    def test_slower_tiers_cost_more_than_the_pool_and_less_than_computing(self):
        costs = Costs()
        price = [placement.cost(Probe(**{name: 1000}, **self.ROOM), 1000, 0, costs, True)
                 for name in ("rows_in_pool", "rows_in_host", "rows_in_file", "queued")]
        self.assertEqual(price, sorted(price))
        self.assertEqual(len(set(price)), 4)

    def test_full_servers_cost_more(self):
        free = placement.cost(Probe(bytes_free=9, bytes_total=10), 0, 0, Costs(), True)
        full = placement.cost(Probe(bytes_free=1, bytes_total=10), 0, 0, Costs(), True)
        self.assertLess(free, full)
        # The prefix cache keeps rows of conversations that will come back.
        self.assertAlmostEqual(Probe(bytes_free=10, bytes_cached=9, bytes_total=10).fill, 0.9)

    def test_who_cannot_take_it_is_impossible(self):
        for probe in (None, Probe(draining=True, **self.ROOM), Probe(bytes_free=99)):
            self.assertEqual(placement.cost(probe, 10, 100, Costs(), True), placement.IMPOSSIBLE)

    def test_home_decides_between_equals(self):
        probe = Probe(**self.ROOM)
        ranked = placement.ranked({"a:1": probe, "b:1": probe, "c:1": None}, 0, {}, Costs(), "b:1")
        self.assertEqual([one.address for one in ranked], ["b:1", "a:1", "c:1"])


class TargetsTest(unittest.TestCase):
    def test_what_names_a_cluster(self):
        from mla_client.cluster import targets
        for target in ("etcd://a:2379/fleet", "etcds://a/f", "dns:///mla:50551", "a:1,b:2"):
            self.assertTrue(targets.names_cluster(target), target)
        for target in ("a:50551", "unix:/run/a,b.sock", "ipv4:1.2.3.4:1,1.2.3.5:1", "[::1]:50551",
                       "dns:a:50551"):
            self.assertFalse(targets.names_cluster(target), target)

    def test_parts_of_targets(self):
        from mla_client.cluster import targets
        target = targets.etcd_target("etcd://a,[::1]:1/fleet/one/")
        self.assertEqual(target.endpoints, (("a", 2379), ("::1", 1)))
        self.assertEqual(target.prefix, "fleet/one")
        self.assertEqual(str(target.endpoints[1]), "[::1]:1")
        self.assertEqual(targets.dns_target("dns:///name"), ("name", 50551))
        self.assertEqual(targets.static_target("a:1, [::1]:2,unix:/s"),
                         ["a:1", "[::1]:2", "unix:/s"])

    def test_bad_targets_are_refused_with_what_is_wrong(self):
        from mla_client.cluster import targets
        for target in ("etcd://a:2379/", "etcd://a:2379", "etcd://u:p@a/f", "etcd:///f",
                       "etcd://a:0/f", "etcd://a/f?x=1", "etcd://a/../f/$", "etcd://a/f//g"):
            with self.assertRaises(errors.InvalidArgument, msg=target) as caught:
                targets.etcd_target(target)
            self.assertEqual(caught.exception.detail.field, "target")
        for target in ("a:1,,b:1", "a:1,a:1", "a:1,b:99999", "a:1,b c:1"):
            with self.assertRaises(errors.InvalidArgument, msg=target):
                targets.static_target(target)
        with self.assertRaises(errors.InvalidArgument):
            targets.static_target(",".join(f"a{n}:1" for n in range(1025)))

    def test_a_users_password_is_not_shown(self):
        from mla_client.cluster import targets
        with self.assertRaises(errors.InvalidArgument) as caught:
            targets.etcd_target("etcd://root:secret@a/f")
        self.assertNotIn("secret", str(caught.exception))


if __name__ == "__main__":
    unittest.main()
