"""In the place of the backend and the connector where vLLM's release is none that was tried: the
reason, when one of them is asked for."""

from mla_client.vllm.plugin import release

release()
