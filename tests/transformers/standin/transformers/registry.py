"""Functions by name, for the whole library."""


class GeneralInterface:
    """A mapping that all instances share."""

    _global_mapping = {}

    def __getitem__(self, key):
        return self._global_mapping[key]

    def __contains__(self, key):
        return key in self._global_mapping

    @classmethod
    def register(cls, key, value):
        cls._global_mapping.update({key: value})
