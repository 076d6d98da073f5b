"""Small models of DeepSeek's architectures, saved as engines load them, with what the library says.

    python3 tests/engines/models.py deepseek_v3 FOLDER [--experts] [--yarn] [--drafts]

Runs in an environment with torch and transformers. Weights are random, with gains by which
attention matters; kv_lora_rank 512 and rope 64 are those of the released models, which engines'
kernels for CPUs expect; there is no tokenizer. FOLDER gets the model, `prompts.json` (token ids),
and `reference.json`: the library's own attention in float32. `reference_bf16.json` is the same
model in bf16, which tells how far a dtype alone goes.
"""

from __future__ import annotations

import argparse
import inspect
import json
import pathlib
from typing import Any, Dict, List

import safetensors.torch
import torch
import transformers

NAMES = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}
LENGTHS = (2, 5, 17, 40, 130)  # of the prompts; the last ones pass a page, and a chunk of 32
NEW_TOKENS, TOP = 24, 8
# Standard deviations of weights, times the root of the inputs; 1 for all others. Experts are kept
# small: rounding tips close choices between them, and the jumps would hide what is compared.
_GAINS = {"q_proj": 1.2, "q_b_proj": 1.2, "kv_b_proj": 1.2, "o_proj": 2.0, "gate": 2.0,
          "experts": 0.3}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {**_ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024,
         "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}


def build(kind: str, experts: bool, yarn: bool, drafts: bool = False) -> Any:
    """A model of three layers: dense ones, or with experts in all but the first; `yarn`: positions
    are scaled as in the released models, which changes the scale of scores, too."""
    config = getattr(transformers, f"{NAMES[kind]}Config")(
        vocab_size=256, hidden_size=512, num_attention_heads=16, num_key_value_heads=16,
        num_hidden_layers=3, intermediate_size=1024, moe_intermediate_size=64, n_routed_experts=8,
        num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1,
        first_k_dense_replace=1 if experts else 4 if drafts else 3,
        q_lora_rank=None if kind == "deepseek_v2" else 192, kv_lora_rank=512,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=4096,
        rope_parameters=dict(_YARN if yarn else _ROPE),
        bos_token_id=None, eos_token_id=None, pad_token_id=0, tie_word_embeddings=False)
    config.moe_layer_freq = 1  # as the released models' files have it, and the next two
    config.scoring_func = "softmax" if kind == "deepseek_v2" else "sigmoid"
    config.topk_method = "greedy" if kind == "deepseek_v2" else "noaux_tc"
    config.architectures = [f"{NAMES[kind]}ForCausalLM"]
    torch.manual_seed(2)
    model = getattr(transformers, f"{NAMES[kind]}ForCausalLM")(config).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.ndim > 1:
                fan_in = 1 if "embed_tokens" in path else weight.shape[-1]
                gain = next((g for part, g in _GAINS.items() if part in path.split(".")), 1.0)
                weight.normal_(std=gain * fan_in ** -0.5)
    return model


def prompts() -> List[List[int]]:
    """Token ids; the longest one begins as the next to last one does."""
    generator = torch.Generator().manual_seed(3)
    made = [torch.randint(1, 256, (length,), generator=generator).tolist() for length in LENGTHS]
    made[-1][:len(made[-2])] = made[-2]
    return made


@torch.no_grad()
def reference(model: Any, given: List[List[int]]) -> List[Dict[str, Any]]:
    """What the library's own attention says of each prompt: the log-probabilities of its tokens,
    then of the NEW_TOKENS that are the best ones, with the TOP best of each step."""
    rows = []
    for prompt in given:
        cache = transformers.DynamicCache(config=model.config)
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else (
            "past_key_values")
        logp = model(input_ids=torch.tensor([prompt]), use_cache=True,
                     **{name: cache}).logits[0].float().log_softmax(-1)
        row: Dict[str, Any] = {
            "prompt": [logp[at - 1, token].item() for at, token in enumerate(prompt)][1:],
            "tokens": [], "tops": []}
        for _ in range(NEW_TOKENS):
            top = logp[-1].topk(TOP)
            row["tokens"].append(int(top.indices[0]))
            row["tops"].append(dict(zip(map(str, top.indices.tolist()), top.values.tolist())))
            logp = model(input_ids=top.indices[None, :1], use_cache=True,
                         **{name: cache}).logits[0].float().log_softmax(-1)
        rows.append(row)
    return rows


def add_drafts(folder: pathlib.Path) -> None:
    """Gives a saved model of dense layers what drafts its next tokens, in two forms: one more layer
    (MTP), and the model of one layer in `folder`/eagle (EAGLE). Both have the weights of the last
    layer, and pass on what that one has found."""
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    config = json.loads((folder / "config.json").read_text())
    norm, embeddings, head = (weights[f"{name}.weight"].clone() for name in (
        "model.norm", "model.embed_tokens", "lm_head"))
    last = {name.removeprefix("model.layers.2."): one for name, one in weights.items()
            if name.startswith("model.layers.2.")}
    eye = torch.eye(len(norm))
    inputs = {"enorm.weight": torch.ones_like(norm), "hnorm.weight": torch.ones_like(norm)}
    mixed = torch.cat((0.1 * eye, eye), dim=1)  # of the token's embedding and what was found
    layer = {**last, **inputs, "eh_proj.weight": mixed, "embed_tokens.weight": embeddings,
             "shared_head.norm.weight": norm, "shared_head.head.weight": head}
    _save(path, {**weights, **{f"model.layers.3.{name}": one for name, one in layer.items()}})
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    (folder / "eagle").mkdir()
    _save(folder / "eagle" / "model.safetensors", {
        **{f"layers.0.{name}": one for name, one in last.items()}, **inputs, "fc.weight": mixed,
        "embed_tokens.weight": embeddings, "norm.weight": norm, "lm_head.weight": head})
    (folder / "eagle" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))


def _save(path: pathlib.Path, weights: Dict[str, torch.Tensor]) -> None:
    """Saves weights, of which some may share memory."""
    safetensors.torch.save_file({name: one.clone() for name, one in weights.items()}, path,
                                {"format": "pt"})


def write(kind: str, folder: pathlib.Path, experts: bool = False, yarn: bool = False,
          drafts: bool = False) -> None:
    """Makes the model and all files in `folder`."""
    model = build(kind, experts, yarn, drafts)
    model.save_pretrained(folder)
    if drafts:
        add_drafts(folder)
    given = prompts()
    (folder / "prompts.json").write_text(json.dumps(given))
    (folder / "reference.json").write_text(json.dumps(reference(model, given)))
    model.to(torch.bfloat16)
    (folder / "reference_bf16.json").write_text(json.dumps(reference(model, given)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=NAMES)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--yarn", action="store_true")
    parser.add_argument("--drafts", action="store_true",
                        help="one more layer, and a model of one layer, which draft")
    args = parser.parse_args()
    torch.set_num_threads(1)
    write(args.kind, args.folder, args.experts, args.yarn, args.drafts)


if __name__ == "__main__":
    main()
