"""Drafts: what followed the longest suffix of a request's tokens the last time."""

import types


class SuffixDecodingCache:
    """Tokens of requests under way; none are kept of those that have ended."""

    def __init__(self, max_tree_depth=24, max_cached_requests=0):
        self._depth = max_tree_depth
        self._tokens = {}
        self.cached_requests = set()

    @property
    def active_requests(self):
        """Requests that have begun and not been stopped."""
        return set(self._tokens)

    def start_request(self, request, prompt):
        """A request begins with these tokens."""
        self._tokens[request] = [int(token) for token in prompt]

    def stop_request(self, request):
        """A request has ended."""
        del self._tokens[request]

    def add_active_response(self, request, tokens):
        """A request goes on with these tokens."""
        self._tokens[request] += [int(token) for token in tokens]

    def speculate(self, request, pattern, max_spec_tokens=None, max_spec_factor=1.0,
                  min_token_prob=0.1):
        """The tokens that are drafted, as many as the suffix that was found is long."""
        known = self._tokens[request]
        for length in range(min(self._depth, len(pattern)), 0, -1):
            suffix = [int(token) for token in pattern[-length:]]
            for at in range(len(known) - length - 1, -1, -1):
                if known[at:at + length] == suffix:
                    most = min(max_spec_tokens, max(1, int(length * max_spec_factor)))
                    return types.SimpleNamespace(
                        token_ids=known[at + length:at + length + most])
        return types.SimpleNamespace(token_ids=[])
