"""Attention of vLLM's MLA models over a KV cache that a server holds.

    MLA_VLLM=1 vllm serve deepseek-ai/DeepSeek-V2-Lite --no-enable-prefix-caching
    --no-async-scheduling \\
        --kv-transfer-config '{"kv_connector": "MlaServerConnector", "kv_role": "kv_both",
            "kv_connector_module_path": "mla_client.vllm.connector",
            "kv_connector_extra_config": {"target": "unix:/run/mla/mla.sock"}}'

It has been tested against doubles with vLLM's signatures; it has not run in vLLM yet.

    requests   which rows of a pass belong to which request: neither vLLM nor torch
    runtime    what the connector and the layers of a worker process share
    connector  the KV connector
    layer      the layer that takes the place of vLLM's
    plugin     the entry point
"""
