"""vLLM with attention on a server: drafts of models and of suffixes, adapters of weights, and many
processes."""

import json
import unittest

import cases
import torch
from safetensors import safe_open
from safetensors.torch import save_file

ENVIRONMENT = "vllm"
GATE = False
KILLED = [[6, "kill", 0], [7, "start", 0]]
RANK = 4  # of a LoRA adapter
LAYERS = 3  # of the models
MTP = {"method": "mtp", "num_speculative_tokens": 1}


def eagle(folder):
    """Drafts of the model of one layer that models.py has made for the one in the folder."""
    return {"method": "eagle", "model": str(folder / "eagle"), "num_speculative_tokens": 2}


def another(folder):
    """Drafts of a whole model, which is the same one, so that most of them are right."""
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}


class Features(unittest.TestCase):
    def run_case(self, rounds, folder=None, reference=None, **case):
        """Runs a case whose rounds must equal the library's for the model in `reference`."""
        folder = folder or cases.model()
        got = cases.run({"model": folder, "extra": cases.COLD, "rounds": rounds, **case})
        for rows in got["rounds"]:
            cases.check(self, rows, reference or folder)
        self.assertEqual({tuple(left) for left in got["counts"]["models_left"]}, {(0, 0)})
        print(self.id().split(".")[-1], {name: got["counts"].get(name) for name in (
            "drafted", "drafts_kept", "failed", "largest")}, flush=True)
        return got["counts"]

    def test_suffix_drafts(self):
        counts = self.run_case([{}, {"events": KILLED}], llm={
            "speculative_config": {"method": "suffix", "num_speculative_tokens": 6}})
        self.assertGreater(counts["drafts_kept"], 0)

    def check_drafts(self, folder, **drafts):
        """Runs a case with drafts of a model, whose layers and rows stay with the engine: the
        server has the layers of the other model alone."""
        counts = self.run_case([{}, {"events": KILLED}], folder, llm={"speculative_config": {
            "attention_backend": "CPU_MLA", **drafts}})
        self.assertEqual(counts["layers"], [[LAYERS]])
        self.assertGreaterEqual(counts["drafted"], counts["drafts_kept"])
        self.assertGreater(counts["drafts_kept"], 0)

    def test_drafts_of_a_models_own_layer(self):
        self.check_drafts(cases.model("deepseek_v3", "--drafts"), **MTP)

    def test_drafts_of_eagle(self):
        folder = cases.model("deepseek_v3", "--drafts")
        self.check_drafts(folder, **eagle(folder))

    def test_drafts_of_another_model(self):
        folder = cases.model("deepseek_v2")
        self.check_drafts(folder, **another(folder))

    def test_a_draft_models_layers_with_this_backend_are_refused(self):
        deep, plain = cases.model("deepseek_v3", "--drafts"), cases.model("deepseek_v2")
        for folder, drafts in ((deep, MTP), (deep, eagle(deep)), (plain, another(plain))):
            with self.subTest(method=drafts["method"]), self.assertRaisesRegex(
                    AssertionError, "a layer of the draft model, whose rows"):
                cases.run({"model": folder, "rounds": [], "llm": {
                    "speculative_config": {"attention_backend": "CUSTOM", **drafts}}})

    def test_adapters_of_other_weights(self):
        """The reference is the model with the adapter's products added to its weights."""
        folder = cases.model()
        changed, adapter = _adapted(folder)
        self.run_case([{}, {"events": KILLED}], folder, changed, lora=str(adapter), llm={
            "enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["o_proj", "q_b_proj"]})

    def test_adapters_of_all_weights_are_refused(self):
        with self.assertRaisesRegex(AssertionError, "LoRA of kv_b_proj"):
            cases.run({"rounds": [], "llm": {"enable_lora": True}})

    def test_four_ranks(self):
        self.run_case([{}, {"events": KILLED}], llm={"tensor_parallel_size": 4})

    def test_eight_ranks(self):
        self.run_case([{}], llm={"tensor_parallel_size": 8})


def _adapted(folder):
    """An adapter of o_proj in all layers, and a model with its products added."""
    changed, adapter = folder.parent / "adapted", folder.parent / "adapter"
    for made in (changed, adapter):
        made.mkdir()
    generator = torch.Generator().manual_seed(5)
    with safe_open(folder / "model.safetensors", "pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}
    parts = {}
    for name in [name for name in weights if name.endswith("o_proj.weight")]:
        rows, columns = weights[name].shape
        a = torch.randn(RANK, columns, generator=generator) * columns ** -0.5
        b = torch.randn(rows, RANK, generator=generator)
        weights[name] = weights[name] + b @ a  # lora_alpha / r is 1
        base = f"base_model.model.{name[:-len('.weight')]}"
        parts.update({f"{base}.lora_A.weight": a, f"{base}.lora_B.weight": b})
    save_file(weights, changed / "model.safetensors", {"format": "pt"})
    (changed / "config.json").write_text((folder / "config.json").read_text())
    save_file(parts, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["o_proj"],
        "bias": "none", "use_rslora": False, "use_dora": False}))
    cases.reference(changed)
    return changed, adapter


if __name__ == "__main__":
    unittest.main()
