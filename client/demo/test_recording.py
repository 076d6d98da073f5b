"""Recordings have the requests and the expected answers."""

import pathlib
import struct
import tempfile
import unittest

import attention
import checks
import generate
import mla_client
import model as models
import numpy as np
import recording
import scenes
import server_binary
from mla_client import DType, Profile
from test_demo import PROMPT, SMALL


class Replayer:
    """Sends a recording again; collects the worst differences from the expected answers."""

    def __init__(self, service, path):
        self.service = service
        self.sequences, self.steps, self.model_of = {}, {}, {}
        self.kinds = []
        self.attends = 0
        # By profile: elements in units of what RECORDING.md allows, cosine difference, lse.
        self.worst = {"EXPANDED": [0.0, 0.0, 0.0], "ABSORBED": [0.0, 0.0, 0.0]}
        for header, payload in recording.read(path):
            kind = header.pop("kind", "header")
            self.kinds.append(kind)
            getattr(self, "do_" + kind)(payload, **header)

    def do_header(self, _, models, **rest):
        for entry in models:
            entry = dict(entry)
            name, layers, scale, page = (entry.pop(key) for key in (
                "model_id", "layers", "softmax_scale", "page_size"))
            self.model_of[name] = self.service.register_model(
                mla_client.ModelSpec(name, mla_client.Geometry(**entry), layers, scale, page))

    def do_weights(self, payload, model_id, layer, head_begin, head_count):
        model = self.model_of[model_id]
        g = model.spec.geometry
        split = head_count * g.nope_dim * g.kv_lora_rank
        values = np.frombuffer(payload, "<u2")
        model.upload_weights(layer, values[:split].reshape(head_count, g.nope_dim, -1),
                             values[split:].reshape(head_count, g.kv_lora_rank, -1), head_begin)

    def do_open(self, _, sequence, model_id):
        self.sequences[sequence] = self.model_of[model_id].open_sequence()

    def do_fork(self, _, sequence, parent, length):
        self.sequences[sequence] = self.sequences[parent].fork(length)

    def do_truncate(self, _, sequence, length):
        self.sequences[sequence].truncate(length)

    def do_release(self, _, sequence):
        self.sequences.pop(sequence).release()

    def do_begin(self, _, step, sequences):
        for entry in sequences:
            assert self.sequences[entry["sequence"]].length == entry["start_position"]
        self.steps[step] = self.service.step([(self.sequences[entry["sequence"]], entry["rows"])
                                              for entry in sequences]).begin()

    def do_attend(self, payload, step, layer, row_begin, row_count, head_offset, num_heads, profile,
                  has_kv, dtype, max_v, **sizes):
        parts, at = [], 0
        for name in ("kv_bytes", "q_bytes", "o_bytes", "lse_bytes"):
            parts.append(payload[at:at + sizes[name]])
            at += sizes[name]
        assert at == len(payload) and has_kv == bool(parts[0]) and dtype == "bf16"
        kv, q = (np.frombuffer(part, "<u2") for part in parts[:2])
        o, lse = (np.frombuffer(part, "<f4") for part in parts[2:])
        result = self.steps[step].attend(
            layer, q.reshape(row_count, num_heads, -1), kv.reshape(row_count, -1), Profile[profile],
            row_begin=row_begin, head_offset=head_offset, want_lse=True, o_dtype=DType.F32)
        o = o.reshape(result.o.shape)
        wrong = np.abs(result.o - o)
        norms = np.linalg.norm(o, axis=-1) * np.linalg.norm(result.o, axis=-1)
        cosine = np.einsum("rhd,rhd->rh", o, result.o, dtype=np.float64) / norms
        self.worst[profile] = np.maximum(self.worst[profile], [
            np.minimum(wrong / (2e-3 * max_v), wrong / (1.6e-2 * np.abs(o) + 1e-30)).max(),
            (1 - cosine).max(), np.abs(result.lse.ravel() - lse).max()])
        self.attends += 1

    def do_end(self, _, step, committed_rows, lengths):
        assert self.steps.pop(step).end(committed_rows) == lengths

    def do_abort(self, _, step):
        self.steps.pop(step).abort()

    def do_done(self, _):
        assert not self.steps


class RecordingTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="mla-recording-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.path = str(self.folder / "demo.rec")

    def record(self, service):
        """The scenes of the demo with a small model; returns the attends made."""
        writer = recording.Writer(self.path)
        recorder = recording.Recorder(service, writer)
        model = models.seeded(SMALL)
        registered = attention.register(recorder, model, "small")
        local = checks.LocalModel(model)
        said = []
        runs = [scenes.generate(model, recorder, registered, profile, PROMPT, 8, said.append)
                for profile in (Profile.EXPANDED, Profile.ABSORBED)]
        # Too few tokens for the scenes' own verdicts; what counts here is the requests.
        scenes.fork(runs[0], local, said.append)
        scenes.speculate(runs[1], local, said.append)
        for run in runs:
            run.generator.sequence.release()
        recorder.close()

    def test_a_replay_gives_what_was_recorded(self):
        self.record(mla_client.LocalReference())
        replay = Replayer(mla_client.LocalReference(), self.path)
        for elements, cosine, lse in replay.worst.values():
            self.assertEqual((elements, lse), (0.0, 0.0))
            self.assertLess(cosine, 1e-6)
        self.assertGreater(replay.attends, 100)
        self.assertEqual(set(replay.kinds), {"header", "weights", "open", "fork", "truncate",
                                             "release", "begin", "attend", "end", "done"})
        self.assertLess(replay.kinds.index("weights"), replay.kinds.index("open"))

    def test_a_replay_against_a_server(self):
        self.record(mla_client.LocalReference())
        for backend, transport, expanded in (("reference", "ring", (1, 1e-5, 1e-3)),
                                             ("cpu", "inline", (5, 1e-4, 5e-2))):
            server = server_binary.start(f"--backend={backend}")
            self.addCleanup(server.stop)
            with mla_client.Client.connect(server.target, transport=transport,
                                           shared_bytes=1 << 20) as client:
                replay = Replayer(client, self.path)
                self.assertEqual(client.sequences(), [])
            for profile, bounds in (("ABSORBED", (1, 1e-5, 1e-3)), ("EXPANDED", expanded)):
                for worst, bound in zip(replay.worst[profile], bounds):
                    self.assertLess(worst, bound, (backend, profile, replay.worst))

    def test_a_wrong_answer_shows(self):
        self.record(mla_client.LocalReference())

        class Wrong(mla_client.LocalReference):
            def _compute(self, opened, model, args, q):
                o, lse = super()._compute(opened, model, args, q)
                return np.roll(o, 1, axis=-1), lse

        replay = Replayer(Wrong(), self.path)
        for elements, cosine, _ in replay.worst.values():
            self.assertGreater(elements, 10)
            self.assertGreater(cosine, 0.1)

    def test_parts_are_taken_over(self):
        part = str(self.folder / "part")
        model = models.seeded(SMALL)
        service = mla_client.LocalReference()
        attention.register(service, model, "small")  # a part's recorder uploads nothing
        recorder = recording.Recorder(service, recording.Writer(part, part=True), first_number=500)
        registered = attention.register(recorder, model, "small")
        with registered.open_sequence() as sequence:
            generate.Generator(model, recorder, sequence, Profile.EXPANDED).prefill(PROMPT[:5])
        recorder.close()
        writer = recording.Writer(self.path)
        attention.register(recording.Recorder(mla_client.LocalReference(), writer), model, "small")
        writer.append_part(part)
        writer.close()
        replay = Replayer(mla_client.LocalReference(), self.path)
        self.assertEqual((replay.attends, replay.worst["EXPANDED"][0]), (SMALL.layers, 0.0))
        self.assertEqual(replay.kinds.count("weights"), SMALL.layers)
        opened = [header for header, _ in recording.read(self.path)
                  if header.get("kind") == "open"]
        self.assertEqual([header["sequence"] for header in opened], [500])

    def test_layout_of_a_record(self):
        writer = recording.Writer(self.path, part=True)
        writer.write("open", (np.arange(3, dtype="<u2"),), sequence=7)
        writer.close()
        data = pathlib.Path(self.path).read_bytes()
        header = b'{"kind": "open", "sequence": 7}'
        self.assertEqual(data, struct.pack("<I", len(header)) + header + struct.pack("<Q", 6)
                         + b"\0\0\1\0\2\0")

    def test_files_that_are_none(self):
        self.record(mla_client.LocalReference())
        whole = pathlib.Path(self.path).read_bytes()
        for damage, word in ((whole[:-1], "cut short"), (whole[:len(whole) // 2], "cut short"),
                             (b"\x7fELF\n" + whole, "not a recording"), (b"", "not a recording"),
                             (whole.replace(b'"version": 1', b'"version": 2', 1), "must be")):
            pathlib.Path(self.path).write_bytes(damage)
            with self.assertRaisesRegex(ValueError, word):
                list(recording.read(self.path))

    def test_one_model_a_file(self):
        recorder = recording.Recorder(mla_client.LocalReference(), recording.Writer(self.path))
        model = models.seeded(SMALL)
        attention.register(recorder, model, "small")
        attention.register(recorder, model, "small")
        with self.assertRaisesRegex(ValueError, "holds"):
            attention.register(recorder, model, "other")
        recorder.close()


if __name__ == "__main__":
    unittest.main()
