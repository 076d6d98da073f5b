"""The entry point of `vllm.general_plugins`: vLLM calls it in every process, maybe more than
once. It only names the backend and the connector; an engine that asks for neither stays as it
is."""

from __future__ import annotations

import logging

from mla_client import errors
from mla_client.serving import Release, check_version

LOG = logging.getLogger("mla_client")
# Releases that this fits, by runs of each end of a range; docs/clients/vllm.md says how.
RELEASES = (Release((0, 25, 1), (0, 25, 1), "pages"), Release((0, 29, 0), (0, 32, 0)))
CONNECTOR = "MlaServerConnector"
LAYER = "MultiHeadLatentAttentionWrapper"
PACKAGE = "mla_client.vllm"


def release() -> Release:
    """The row of RELEASES of the vLLM that is installed. Unimplemented outside of them."""
    # pylint: disable=import-outside-toplevel
    from vllm.version import __version__

    return check_version("vLLM", __version__, RELEASES)


def register() -> None:
    """Makes `--attention-backend CUSTOM` and the connector MlaServerConnector known. In another
    release of vLLM both refuse, with the reason, when they are asked for."""
    # pylint: disable=import-outside-toplevel
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    backend, connector = f"{PACKAGE}.backend", f"{PACKAGE}.connector"
    try:
        row = release()
    except errors.Unimplemented as error:
        LOG.warning("mla: %s", error)
        backend = connector = f"{PACKAGE}.refusal"
    else:
        if row.note == "pages":
            _small_pages()
        else:
            _replaceable_layers()
    register_backend(AttentionBackendEnum.CUSTOM, f"{backend}.MlaServerBackend")
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, connector, CONNECTOR)


def _replaceable_layers() -> None:
    """Names the attention layer that may have its projections on the server, unless the platform
    has one of its own. It is vLLM's layer where the option `projected` is not given."""
    # pylint: disable=import-outside-toplevel
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
    from vllm.platforms import current_platform

    if LAYER in op_registry_oot or current_platform.is_out_of_tree():
        return
    from mla_client.vllm.projected import ProjectedLayer

    PluggableLayer.register_oot(ProjectedLayer, name=LAYER)


def _small_pages() -> None:
    """In 0.25.1, which does not ask a backend for its pages (customize_spec): the one change to a
    layer, of what it says of its pages where the backend is this one."""
    # pylint: disable=import-outside-toplevel
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    before = MLAAttention.get_kv_cache_spec
    if getattr(before, "of_mla_client", False):
        return

    def get_kv_cache_spec(self, vllm_config):
        spec = before(self, vllm_config)
        customize = getattr(self.attn_backend, "customize_spec", None)
        return spec if customize is None else customize(spec)

    get_kv_cache_spec.of_mla_client = True  # type: ignore[attr-defined]
    MLAAttention.get_kv_cache_spec = get_kv_cache_spec
