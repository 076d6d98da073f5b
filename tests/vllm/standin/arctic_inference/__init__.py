"""Stands in for Arctic Inference, which PyPI has as source alone: what vLLM's proposer of suffix
drafts calls."""
