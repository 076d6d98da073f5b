"""`generate()`: what it calls of a model and of its cache, in that order."""

import torch

from transformers.cache_utils import DynamicCache


class Generated:
    """Tokens [rows, all], the logits [rows, vocab] each was chosen from, and the cache. beams: for
    each choice the row of the step before that each row goes on from."""

    def __init__(self, sequences, logits, past_key_values, beams=()):
        self.sequences, self.logits, self.beams = sequences, logits, beams
        self.past_key_values = past_key_values


class GenerationMixin:
    """Text from a model: greedy, sampled, by beams, and with drafts that are verified."""

    @torch.no_grad()
    def generate(self, input_ids, attention_mask=None, max_new_tokens=8, do_sample=False,
                 num_beams=1, num_return_sequences=1, prompt_lookup_num_tokens=None,
                 past_key_values=None, use_cache=True, eos_token_id=None, pad_token_id=0,
                 prefill_chunk_size=None, **kwargs):
        """Sampling draws from torch's generator."""
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        expand = max(num_beams, num_return_sequences)
        input_ids = input_ids.repeat_interleave(expand, dim=0)
        state = {"attention_mask": attention_mask.repeat_interleave(expand, dim=0),
                 "use_cache": use_cache, **kwargs}
        if past_key_values is not None:
            past_key_values._is_user_defined = True
        elif use_cache:
            past_key_values = DynamicCache(config=self.config)
        state["past_key_values"] = past_key_values
        if num_beams > 1:
            return self._beams(input_ids, state, num_beams, max_new_tokens)
        if prompt_lookup_num_tokens:
            return self._assisted(input_ids, state, prompt_lookup_num_tokens, max_new_tokens)
        return self._sample(input_ids, state, max_new_tokens, do_sample, eos_token_id, pad_token_id,
                            prefill_chunk_size)

    def _inputs(self, input_ids, state, rows):
        """Of a forward pass: the last `rows` of the tokens."""
        mask = state["attention_mask"]
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, mask.shape[1] - rows:]
        return {**state, "input_ids": input_ids[:, -rows:].clone(), "position_ids": positions}

    def _forward(self, input_ids, state, rows, chosen=1):
        """Runs a pass and takes its cache over."""
        outputs = self(**self._inputs(input_ids, state, rows))
        state["past_key_values"] = outputs.past_key_values
        self._grow(state, chosen)
        return outputs

    @staticmethod
    def _grow(state, chosen):
        mask = state["attention_mask"]
        state["attention_mask"] = torch.cat((mask, mask.new_ones(len(mask), chosen)), dim=1)

    def _prefill(self, input_ids, state, chunk):
        seen = state["past_key_values"].get_seq_length() if state["past_key_values"] else 0
        if chunk is None:
            return self._forward(input_ids, state, input_ids.shape[1] - seen)
        whole = state["attention_mask"]
        for begin in range(0, input_ids.shape[1], chunk):
            end = min(begin + chunk, input_ids.shape[1])
            state["attention_mask"] = whole[:, :end]
            outputs = self._forward(input_ids[:, :end], state, end - begin, chosen=0)
        self._grow(state, 1)
        return outputs

    def _sample(self, input_ids, state, count, do_sample, eos, pad, chunk):
        outputs, logits = self._prefill(input_ids, state, chunk), []
        unfinished = torch.ones(len(input_ids), dtype=torch.long)
        while True:
            logits.append(outputs.logits[:, -1])
            if do_sample:
                tokens = torch.multinomial(logits[-1].softmax(-1), 1)[:, 0]
            else:
                tokens = logits[-1].argmax(-1)
            tokens = tokens * unfinished + pad * (1 - unfinished)
            input_ids = torch.cat((input_ids, tokens[:, None]), dim=1)
            if eos is not None:
                unfinished = unfinished * (tokens != eos)
            if len(logits) == count or not unfinished.any():
                return Generated(input_ids, logits, state["past_key_values"])
            outputs = self._forward(input_ids, state, 1)

    def _beams(self, input_ids, state, beams, count):
        outputs, logits, moves = self._prefill(input_ids, state, None), [], []
        prompts = len(input_ids) // beams
        scores = torch.tensor([0.0] + [-1e9] * (beams - 1)).repeat(prompts)
        while True:
            logits.append(outputs.logits[:, -1])
            total = (logits[-1].log_softmax(-1) + scores[:, None]).view(prompts, -1)
            best, index = total.topk(beams, dim=-1)
            vocab = logits[-1].shape[-1]
            row = (index // vocab + torch.arange(prompts)[:, None] * beams).view(-1)
            scores = best.view(-1)
            input_ids = torch.cat((input_ids[row], (index % vocab).view(-1, 1)), dim=1)
            moves.append(row)
            state["past_key_values"].reorder_cache(row)
            if len(logits) == count:
                return Generated(input_ids, logits, state["past_key_values"], moves)
            outputs = self._forward(input_ids, state, 1)

    def _assisted(self, input_ids, state, drafted, count):
        state["past_key_values"].activate_past_recording()
        logits, first, end = [], True, input_ids.shape[1] + count
        while input_ids.shape[1] < end:
            draft = self._looked_up(input_ids, min(drafted, end - input_ids.shape[1] - 1))
            tried = torch.cat((input_ids, draft), dim=1)
            whole = dict(state)
            self._grow(whole, tried.shape[1] - whole["attention_mask"].shape[1])
            outputs = self(**self._inputs(tried, whole,
                                          tried.shape[1] if first else draft.shape[1] + 1))
            state["past_key_values"] = outputs.past_key_values
            new = outputs.logits[:, -draft.shape[1] - 1:]
            chosen = new.argmax(-1)
            matches = int((draft == chosen[:, :-1]).long().cumprod(-1).sum())
            input_ids = torch.cat((input_ids, chosen[:, :matches + 1]), dim=1)
            logits += list(new[:, :matches + 1].unbind(1))
            outputs.past_key_values.crop(-(draft.shape[1] - matches))
            self._grow(state, matches + 1)
            first = False
        return Generated(input_ids, logits, state["past_key_values"])

    @staticmethod
    def _looked_up(input_ids, most):
        """Tokens that followed the last one before; else any, which the model refuses."""
        tokens = input_ids[0].tolist()
        for at in range(len(tokens) - 2, -1, -1):
            if tokens[at] == tokens[-1]:
                return torch.tensor([tokens[at + 1:at + 1 + most]], dtype=torch.long)
        return torch.zeros((1, max(0, most)), dtype=torch.long)
