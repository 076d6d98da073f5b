"""Attention of SGLang's MLA models over a KV cache that a server holds.

    MLA_SGLANG='{"target": "unix:/run/mla-server/mla.sock"}' \\
        sglang serve --model-path deepseek-ai/DeepSeek-V2-Lite \\
        --attention-backend mla_server --disable-cuda-graph

    plugin     the entry point: names and hooks, nothing else
    hooks      what is called in SGLang's place, or around it
    checks     what is refused, and what rows depend on
    runtime    requests, prefixes and passes of one scheduler process
    backend    the attention backend
"""

# Names of the attention backend and of the variable with the options: JSON with `target`,
# and what else mla_client.serving.Options takes.
NAME = "mla_server"
OPTIONS = "MLA_SGLANG"
