"""The target's continuations without SGLang: many prompts at once on one device, all a token further each step.

For small Llama models, where a server's bookkeeping costs more than the model: the key-value cache is one preallocated
tensor, prompts of like length share a batch, and nothing is read back until a batch ends. Other models are decoded by
transformers (`GreedyGenerator`).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, apply_rotary_pos_emb

PREFILL_TOKENS = 131072
CHECK_EVERY = 16


class LockstepGenerator:
    """Continuations of a Llama model, greedy or sampled from its own distribution at a temperature.

    Args:
        model: LlamaForCausalLM (ValueError for another).
        batch: prompts at once. seed: of the samples.
    """

    def __init__(self, model: nn.Module, batch: int, seed: int = 0):
        if not isinstance(model, LlamaForCausalLM):
            raise ValueError(f"the model is {type(model).__name__}; lockstep decoding reads LlamaForCausalLM only")
        self.model, self.batch = model, batch
        self.generator = torch.Generator(model.device).manual_seed(seed)
        self.stops = stop_tokens(model)

    def __call__(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        temperature: float = 0.0,
        forbidden: tuple[int, ...] = (),
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[list[int]]:
        """One continuation a prompt, cut after its first stop token, in the prompts' order."""

        def write(batch):
            return self._batch(batch, max_new_tokens, temperature, forbidden)

        return _in_batches(prompts, self.batch, self.stops, write, progress)

    @torch.inference_mode()
    def _batch(self, prompts, max_new_tokens: int, temperature: float, forbidden) -> list[list[int]]:
        device, count, width = self.model.device, len(prompts), max(map(len, prompts))
        ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], device=device)
        absent = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
        config = self.model.config
        shape = (count, config.num_key_value_heads, width + max_new_tokens, config.head_dim)
        layers = range(config.num_hidden_layers)
        keys = [torch.empty(shape, dtype=self.model.dtype, device=device) for _ in layers]
        values = [torch.empty(shape, dtype=self.model.dtype, device=device) for _ in layers]
        # Left padding is shut out by a bias on the scores, [count, 1, 1, width + new].
        hidden_places = torch.arange(shape[2], device=device) < absent[:, None]
        bias = torch.zeros(count, 1, 1, shape[2], dtype=self.model.dtype, device=device)
        bias.masked_fill_(hidden_places[:, None, None], -torch.inf)

        token = self._prefill(ids, absent, keys, values, temperature, forbidden)
        out, stops = torch.full((count, max_new_tokens), -1, device=device), torch.tensor(self.stops, device=device)
        out[:, 0] = token
        for step in range(1, max_new_tokens):
            if step % CHECK_EVERY == 0 and bool(torch.isin(out, stops).any(1).all()):
                break
            hidden = self._decode(token, width + step - 1, absent, keys, values, bias)
            token = self._choose(hidden, temperature, forbidden)
            out[:, step] = token
        return out.tolist()

    def _prefill(self, ids, absent, keys, values, temperature, forbidden) -> Tensor:
        """Read right-padded prompts, where causality is mask enough, and lay their keys out ending at one column."""
        width, tokens = ids.shape[1], []
        column = torch.arange(width, device=ids.device)
        at_once = max(1, PREFILL_TOKENS // width)
        for first in range(0, len(ids), at_once):
            part = slice(first, first + at_once)
            out = self.model.model(input_ids=ids[part], use_cache=True)
            # Columns before a prompt repeat its first token: finite, and shut out by the bias.
            place = (column - absent[part, None]).clamp(min=0)[:, None, :, None]
            for layer, stored in enumerate(out.past_key_values.layers):
                for cache, new in ((keys, stored.keys), (values, stored.values)):
                    cache[layer][part, :, :width] = new.gather(2, place.expand_as(new))
            last = width - 1 - absent[part]
            final = out.last_hidden_state[torch.arange(len(last), device=ids.device), last]
            tokens.append(self._choose(final, temperature, forbidden))
        return torch.cat(tokens)

    def _decode(self, token, place: int, absent, keys, values, bias) -> Tensor:
        """One token further for all: token [N] at cache column `place` -> final-normed hidden [N, H]."""
        body, config = self.model.model, self.model.config
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        x = body.embed_tokens(token)
        cos, sin = body.rotary_emb(x, (place - absent)[:, None])
        for layer, block in enumerate(body.layers):
            normed, attention = block.input_layernorm(x), block.self_attn
            q = attention.q_proj(normed).view(-1, heads, 1, head_dim)
            k = attention.k_proj(normed).view(-1, kv_heads, 1, head_dim)
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            keys[layer][:, :, place] = k[:, :, 0]
            values[layer][:, :, place] = attention.v_proj(normed).view(-1, kv_heads, head_dim)
            # The queries of one key-value head are rows of one product: no key is read twice.
            grouped = q.view(-1, kv_heads, heads // kv_heads, head_dim)
            seen = slice(0, place + 1)
            scores = grouped @ keys[layer][:, :, seen].transpose(-1, -2) * attention.scaling + bias[..., seen]
            mixed = scores.softmax(-1, dtype=torch.float32).to(x.dtype) @ values[layer][:, :, seen]
            x = x + attention.o_proj(mixed.reshape(len(x), heads * head_dim))
            normed, mlp = block.post_attention_layernorm(x), block.mlp
            x = x + mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))
        return body.norm(x)

    def _choose(self, hidden: Tensor, temperature: float, forbidden: tuple[int, ...]) -> Tensor:
        logits = self.model.lm_head(hidden)
        if forbidden:
            logits[:, list(forbidden)] = -torch.inf
        if not temperature:
            return logits.argmax(-1)
        # Gumbel: argmax(logits / T - log(-log u)) is a sample of softmax(logits / T).
        noise = torch.empty_like(logits, dtype=torch.float32).exponential_(generator=self.generator)
        return (logits.float() / temperature - noise.log()).argmax(-1)


class GreedyGenerator:
    """Greedy continuations of any model that transformers generates with: the likeliest token each time, whatever penalties
    the model's own generation config would add.

    Args:
        model: of a causal language model. batch: prompts at once.
    """

    def __init__(self, model: nn.Module, batch: int):
        self.model, self.batch, self.stops = model, batch, stop_tokens(model)

    def __call__(
        self, prompts: list[list[int]], max_new_tokens: int, progress: Callable[[int], None] = lambda done: None
    ) -> list[list[int]]:
        """One continuation a prompt, cut after its first stop token, in the prompts' order."""
        padding = self.stops[0] if self.stops else 0
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(self.stops) or None,
            pad_token_id=padding,
        )

        @torch.inference_mode()
        def write(batch):
            width = max(map(len, batch))
            rows = [[padding] * (width - len(prompt)) + prompt for prompt in batch]
            mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch]
            ids, mask = (torch.tensor(part, device=self.model.device) for part in (rows, mask))
            return self.model.generate(ids, attention_mask=mask)[:, width:].tolist()

        # What a config that is handed over leaves open, transformers takes from the model's own.
        kept, self.model.generation_config = self.model.generation_config, settings
        try:
            return _in_batches(prompts, self.batch, self.stops, write, progress)
        finally:
            self.model.generation_config = kept


def stop_tokens(model: nn.Module) -> tuple[int, ...]:
    """The tokens that end an answer of the model, by its generation config."""
    stop = model.generation_config.eos_token_id
    return () if stop is None else tuple(stop) if isinstance(stop, list) else (stop,)


def _in_batches(prompts, size: int, stops: tuple[int, ...], write, progress) -> list[list[int]]:
    """What `write` makes of prompts of like length, `size` at once, cut after each one's first stop token."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    written: list[list[int]] = [[] for _ in prompts]
    for first in range(0, len(order), size):
        chosen = order[first : first + size]
        for index, row in zip(chosen, write([prompts[index] for index in chosen]), strict=True):
            end = next((place for place, token in enumerate(row, 1) if token in stops), len(row))
            written[index] = row[:end]
        progress(first + len(chosen))
    return written
