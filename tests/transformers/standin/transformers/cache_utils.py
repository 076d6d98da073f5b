"""Caches: a list of layers, to each of which the rows of a layer are added."""

import abc

import torch


class CacheLayerMixin(abc.ABC):
    """What every layer of a cache offers."""

    is_compileable = False
    is_croppable = False
    supports_early_init = True

    def __init__(self, **kwargs):
        self.keys = self.values = None
        self.is_initialized = False

    @abc.abstractmethod
    def lazy_initialization(self, key_states, value_states): ...

    @abc.abstractmethod
    def update(self, key_states, value_states, *args, **kwargs): ...

    @abc.abstractmethod
    def get_mask_sizes(self, query_length): ...

    @abc.abstractmethod
    def get_seq_length(self): ...

    @abc.abstractmethod
    def get_max_length(self): ...

    def offload(self):
        self.keys, self.values = self.keys.to("cpu"), self.values.to("cpu")

    def prefetch(self):
        self.keys, self.values = self.keys.to(self.device), self.values.to(self.device)

    def reset(self):
        if self.is_initialized:
            self.keys.zero_()
            self.values.zero_()

    def reorder_cache(self, beam_idx):
        if self.get_seq_length() > 0:
            self.keys, self.values = self.keys[beam_idx], self.values[beam_idx]


class DynamicLayer(CacheLayerMixin):
    """Rows in tensors that grow."""

    is_sliding = False
    is_croppable = True

    def lazy_initialization(self, key_states, value_states):
        self.device = key_states.device
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = torch.cat((self.keys, key_states), dim=-2)
        self.values = torch.cat((self.values, value_states), dim=-2)
        return self.keys, self.values

    def get_mask_sizes(self, query_length):
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self):
        return self.keys.shape[-2] if self.is_initialized else 0

    def get_max_length(self):
        return -1

    def crop(self, tokens_to_remove):
        keep = tokens_to_remove
        if keep <= 0:
            keep += self.get_seq_length()
        self.keys, self.values = self.keys[..., :keep, :], self.values[..., :keep, :]

    def batch_repeat_interleave(self, repeats):
        self.keys = self.keys.repeat_interleave(repeats, dim=0)
        self.values = self.values.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices):
        self.keys, self.values = self.keys[indices], self.values[indices]


class Cache:
    """A cache of all layers."""

    def __init__(self, layers=None, layer_class_to_replicate=None, offloading=False,
                 offload_only_non_sliding=True):
        if (layers is None) == (layer_class_to_replicate is None):
            raise ValueError("exactly one of layers and layer_class_to_replicate")
        self.layers = layers if layers is not None else []
        self.layer_class_to_replicate = layer_class_to_replicate
        self.offloading = offloading

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        while self.layer_class_to_replicate is not None and len(self.layers) <= layer_idx:
            self.layers.append(self.layer_class_to_replicate())
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self, layer_idx=0):
        return self.layers[layer_idx].get_seq_length() if layer_idx < len(self.layers) else 0

    def get_max_length(self, layer_idx=None):
        if layer_idx is None:
            return max(layer.get_max_length() for layer in self.layers)
        return self.layers[layer_idx].get_max_length() if layer_idx < len(self.layers) else -1

    def get_mask_sizes(self, query_length, layer_idx):
        if layer_idx >= len(self.layers):
            return query_length, 0
        return self.layers[layer_idx].get_mask_sizes(query_length)

    def get_query_offset(self, layer_idx=0):
        return self.get_seq_length(layer_idx=layer_idx)

    def reset(self):
        for layer in self.layers:
            layer.reset()

    def reorder_cache(self, beam_idx):
        for layer in self.layers:
            layer.reorder_cache(beam_idx)

    def crop(self, tokens_to_remove):
        for layer in self.layers:
            layer.crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats):
        for layer in self.layers:
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices):
        for layer in self.layers:
            layer.batch_select_indices(indices)

    def activate_past_recording(self):
        for layer in self.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    @property
    def is_compileable(self):
        return bool(self.layers) and all(layer.is_compileable for layer in self.layers)

    @property
    def is_croppable(self):
        return all(layer.is_croppable for layer in self.layers)

    @property
    def is_sliding(self):
        return [getattr(layer, "is_sliding", False) for layer in self.layers]


class DynamicCache(Cache):
    """The cache that generate() makes by default."""

    def __init__(self, ddp_cache_data=None, config=None, offloading=False,
                 offload_only_non_sliding=False):
        if config is None:
            super().__init__(layer_class_to_replicate=DynamicLayer, offloading=offloading,
                             offload_only_non_sliding=offload_only_non_sliding)
        else:
            super().__init__(layers=[DynamicLayer() for _ in range(config.num_hidden_layers)],
                             offloading=offloading,
                             offload_only_non_sliding=offload_only_non_sliding)
