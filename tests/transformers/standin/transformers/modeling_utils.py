"""What models share."""

import torch

from transformers.registry import GeneralInterface


class AttentionInterface(GeneralInterface):
    """Attention functions by name; eager is each model's own."""

    _global_mapping = {}

    def get_interface(self, attn_implementation, default):
        if attn_implementation != "eager" and attn_implementation not in self:
            raise KeyError(attn_implementation)
        return self._global_mapping.get(attn_implementation, default)


ALL_ATTENTION_FUNCTIONS = AttentionInterface()


class _Handle:
    """Removes a hook."""

    def __init__(self, hooks, hook):
        self._hooks, self._hook = hooks, hook

    def remove(self):
        self._hooks.remove(self._hook)


class PreTrainedModel(torch.nn.Module):
    """A model with a config. Hooks that see named arguments are torch 2's, so they are here."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self._named_hooks = []

    def set_attn_implementation(self, attn_implementation, allow_all_kernels=False):
        if attn_implementation != "eager" and attn_implementation not in ALL_ATTENTION_FUNCTIONS:
            raise ValueError(attn_implementation)
        self.config._attn_implementation = attn_implementation

    def register_forward_pre_hook(self, hook, *, prepend=False, with_kwargs=False):
        assert with_kwargs and not prepend
        self._named_hooks.append(hook)
        return _Handle(self._named_hooks, hook)

    def __call__(self, *args, **kwargs):
        for hook in self._named_hooks:
            args, kwargs = hook(self, args, kwargs)
        return super().__call__(*args, **kwargs)
