"""Attention of vLLM's MLA models over a KV cache that a server holds.

    vllm serve deepseek-ai/DeepSeek-V2-Lite --attention-backend CUSTOM \\
        --kv-transfer-config '{"kv_connector": "MlaServerConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"target": "unix:/run/mla-server/mla.sock"}}'

    plugin     the entry point: names the two, and looks at vLLM's version
    backend    the attention backend
    connector  the KV connector
    checks     what of a configuration is refused, and what rows depend on
    runtime    what the backend and the connector of a worker process share
    projected  the attention layer whose projections the server may have, too
    weights    the weights of a layer, read back from vLLM's modules
    refusal    what takes the place of the two in another release of vLLM
"""
