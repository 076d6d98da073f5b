"""Attention of SGLang's MLA models over a KV cache that a server holds.

    MLA_SGLANG='{"target": "unix:/run/mla/mla.sock"}' \\
        python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V2-Lite \\
        --attention-backend mla_server --disable-radix-cache --disable-overlap-schedule \\
        --disable-decode-cuda-graph --disable-prefill-cuda-graph

It has been tested against doubles with SGLang's signatures; it has not run in SGLang yet.

    requests   which requests a pass has, and which have ended: neither SGLang nor torch
    backend    the attention backend
    plugin     the entry point
"""
