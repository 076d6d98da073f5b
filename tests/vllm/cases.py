"""Shared parts of the tests of vLLM: models, which are made once, cases in their own processes, and
the comparison with the library."""

import atexit
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests" / "engines")]

# pylint: disable=wrong-import-position
import compare

# An engine needs a hundredth of this to start, run its rounds and end, on a machine of its own.
TIMEOUT_S = 3000
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3,
         "prompt_lookup_min": 1}
COLD = {"prefix_cache": False}  # prompt logprobs keep requests out of the cache, too

_FOLDER = pathlib.Path(tempfile.mkdtemp(prefix="mla-vllm-"))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)


def model(kind="deepseek_v3", *options):
    """The folder of a small model, with the library's results for it."""
    folder = _FOLDER / "-".join([kind, *(option.strip("-") for option in options)])
    if not (folder / "reference_bf16.json").exists():
        subprocess.run([sys.executable, str(ROOT / "tests/engines/models.py"), kind, str(folder),
                        *options], check=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL, timeout=TIMEOUT_S)
    return folder


def reference(folder):
    """Writes the library's results for a model that is in the folder."""
    code = ("import json, pathlib, sys, torch, transformers, models; torch.set_num_threads(1); "
            "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval(); "
            "pathlib.Path(sys.argv[1], 'reference.json').write_text(json.dumps("
            "models.reference(model, models.prompts())))")
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=TIMEOUT_S,
                   stdout=subprocess.DEVNULL)


def run(case):
    """Returns the rounds and counts of a case. Raises AssertionError with the end of its log."""
    with tempfile.TemporaryDirectory() as folder:
        given, out = pathlib.Path(folder) / "case.json", pathlib.Path(folder) / "out.json"
        given.write_text(json.dumps({**case, "model": str(case.get("model") or model())}))
        done = subprocess.run([sys.executable, str(HERE / "engine.py"), str(given), str(out)],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=TIMEOUT_S, env=dict(os.environ), check=False)
        if done.returncode or not out.exists():
            raise AssertionError(f"status {done.returncode}\n{done.stdout[-6000:]}")
        return {**json.loads(out.read_text()), "log": done.stdout}


def check(test, rows, folder, without=()):
    """Checks that the rows of a round equal the library's. Rows in `without` were aborted."""
    want = json.loads((folder / "reference.json").read_text())
    for number in without:
        test.assertIsNone(rows[number])
    kept = [number for number in range(len(want)) if number not in without]
    right, got = ([part[number] for number in kept] for part in (want, rows))
    if not any(row["prompt"] for row in got):
        for row in got:  # a round without prompt logprobs: use the library's
            row["prompt"] = right[got.index(row)]["prompt"]
    found = compare.compare(right, got)
    test.assertTrue(found.ok, str(found))
    print(f"{test.id().split('.')[-1]}: {found}", flush=True)
