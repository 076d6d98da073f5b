"""Attention of transformers' MLA models over a KV cache that a server holds.

    model = transformers.AutoModelForCausalLM.from_pretrained(...)
    with mla_client.Client.connect("unix:/run/mla-server/mla.sock") as client:
        mla_client.transformers.attach(model, client)
        model.generate(...)

Needs torch and transformers 5.17 to 5.24; `import mla_client` alone does not.
"""

from __future__ import annotations

from typing import Any

from mla_client.service import Service
from mla_client.serving.layers import check_projected_dtype
from mla_client.transformers.attachment import STEP_LEASE_MS, Attachment, attach_checked
from mla_client.transformers.attention import register
from mla_client.transformers.cache import RemoteCache
from mla_client.transformers.models import MODEL_TYPES, PROJECTED_TYPES, layers_of
from mla_client.transformers.probe import check_library, check_version

# Makes the name known to `from_pretrained(attn_implementation="mla_server")`.
register()

__all__ = ["MODEL_TYPES", "PROJECTED_TYPES", "Attachment", "RemoteCache", "attach"]


def attach(model: Any, service: Service, *, model_id: str = "", kv_format: str = "",
           page_size: int = 0, step_lease_ms: int = STEP_LEASE_MS,
           projected: bool = False, projected_dtype: str = "") -> Attachment:
    """Lets `service`, a Client or a LocalReference, compute the attention of a transformers model.

    Registers the model there and uploads W_UK and W_UV of every layer. `model_id`, `kv_format` and
    `page_size` are as in ModelSpec; the default id follows from the weights. From then on each call
    of `generate()` makes a cache on the server and frees it at its end.

    With `projected` the server also has W_UQ and W_O, and gets low-rank queries for hidden states:
    a quarter of the bytes, for servers on other hosts (docs/projected.md). For models of
    `PROJECTED_TYPES` with low-rank queries. `projected_dtype` says how the server holds these two:
    "bf16"; "e4m3", as the codes and scales of blocks of 128 x 128 that q_b_proj and o_proj of every
    layer have, in half the bytes; or "" for codes where all layers have them.

    A model may be used by several threads as far as transformers allows it; a cache belongs to one.
    Raises Unimplemented, with the reason, for a release of transformers, a model or a feature that
    is not supported. Also raises the service's own errors; later calls raise them in the forward
    pass.
    """
    check_version()
    check_projected_dtype(projected_dtype, projected)
    layers_of(model, projected)
    check_library(model, projected)
    return attach_checked(model, service, model_id, kv_format, page_size, step_lease_ms, projected,
                          projected_dtype)
