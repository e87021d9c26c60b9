"""The configuration of a DFlash or JetFlow draft head: the `config.json` of its folder."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_specflow.errors import SpecflowConfigError

ARCHITECTURE = "DFlashDraftModel"
FETCH_AGAIN = "download the folder again"
DTYPES = ("bfloat16", "float16", "float32")
LAYER_TYPES = ("full_attention", "sliding_attention")
# Fields with which other DFlash relatives change the arithmetic (read from SGLang 0.5.23, models/dflash.py and
# speculative/dflash_utils.py), and the only value under which the plain head's arithmetic holds.
NEUTRAL = {
    "attention_bias": False,
    "use_gemma_norm": False,
    "attention_sink_bias": False,
    "attention_value_scale": None,
    "conv_kernel_size": 0,
    "selector_rank": 0,
    "projector_type": None,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "rope_is_neox_style": True,
}


@dataclass(frozen=True)
class HeadConfig:
    """Shape and semantics of a draft head. Names follow the public `config.json`; lengths are in tokens.

    `causal_head`: attention inside the block is causal (JetFlow) or bidirectional (DFlash). `is_causal` overrides the
    rule of `layer_is_causal` where a checkpoint states it. `target_layer_ids` count the target's decoder layers from 0
    and name their outputs.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    causal_head: bool = False
    is_causal: bool | None = None
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    rope_theta: float = 10000.0
    rotary_dim: int = 0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def load(cls, folder: str | Path) -> "HeadConfig":
        """Read `folder/config.json`. Raises SpecflowConfigError for a missing, broken or unsupported one."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise SpecflowConfigError(
                given=f"the draft head {folder}, which has no config.json",
                allowed="a Hugging Face folder with config.json and safetensors files",
                todo="give the folder of a complete draft head",
            )
        try:
            return cls.from_dict(json.loads(path.read_text()), str(path))
        except SpecflowConfigError:
            raise
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise SpecflowConfigError(
                given=f"{path}, which cannot be read ({type(error).__name__}: {error})",
                allowed="a JSON object with the fields of the DFlash format, each of its type",
                todo=FETCH_AGAIN,
            ) from error

    @classmethod
    def from_dict(cls, raw: dict[str, Any], source: str = "config.json") -> "HeadConfig":
        """Parse the content of a `config.json`; `source` names it in errors (SpecflowConfigError)."""
        fields = _Fields(raw, source)
        if ARCHITECTURE not in (raw.get("architectures") or []):
            fields.refuse(
                f"architectures {raw.get('architectures')}", f"['{ARCHITECTURE}']", "give a DFlash or JetFlow head"
            )
        for name, neutral in NEUTRAL.items():
            for place in (raw, fields.dflash):
                if (place.get(name, neutral) or neutral) != neutral:
                    fields.refuse(f"{name} {place[name]!r}", repr(neutral), "give a head without it")
        hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads", least=1)
        head_dim = fields.whole("head_dim", hidden // heads)
        layers = fields.whole("num_hidden_layers")
        theta, rotary_dim = fields.rope(head_dim)
        config = cls(
            hidden_size=hidden,
            intermediate_size=fields.whole("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=fields.whole("num_key_value_heads", heads),
            head_dim=head_dim,
            vocab_size=fields.whole("vocab_size"),
            block_size=fields.whole("block_size", 16, least=2),
            num_target_layers=fields.whole("num_target_layers"),
            target_layer_ids=tuple(fields.get("target_layer_ids") or ()),
            mask_token_id=fields.whole("mask_token_id", least=0),
            causal_head=fields.flag("causal_head"),
            is_causal=raw.get("is_causal"),
            layer_types=tuple(raw.get("layer_types") or ("full_attention",) * layers),
            sliding_window=raw.get("sliding_window"),
            rope_theta=theta,
            rotary_dim=rotary_dim,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=fields.whole("max_position_embeddings", 32768),
            raw=raw,
        )
        fields.check(config)
        return config

    @property
    def depth(self) -> int:
        """Depths that one pass predicts: output position i >= 1 predicts the token at anchor + i."""
        return self.block_size - 1

    @property
    def context_size(self) -> int:
        """Width of the concatenated target hidden states that `fc` reads."""
        return self.hidden_size * len(self.target_layer_ids)

    def layer_is_causal(self, layer: int) -> bool:
        """Whether attention inside the block is causal in draft layer `layer`.

        A JetFlow head is causal throughout. In a DFlash head the full layers are bidirectional and the sliding ones
        causal, unless the checkpoint says `is_causal` (SGLang 0.5.23, `_get_dflash_layer_attention_params`).
        """
        if self.causal_head:
            return True
        return self.layer_types[layer] == "sliding_attention" if self.is_causal is None else self.is_causal

    def layer_window(self, layer: int) -> int | None:
        """Keys that a query of draft layer `layer` sees, itself included, or None for all (HF's counting)."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def check_against_target(
        self, hidden_size: int, vocab_size: int, num_hidden_layers: int, name: str = "the target"
    ) -> None:
        """Refuse a target for which this head was not made. Raises SpecflowConfigError, naming the field.

        Args:
            hidden_size, vocab_size, num_hidden_layers: the target's text config (vocabulary = rows of its embedding).
            name: the target's path, for the message.
        """
        wrong = []
        if hidden_size != self.hidden_size:
            wrong.append(f"hidden_size {self.hidden_size}, the target has {hidden_size}")
        if num_hidden_layers != self.num_target_layers:
            wrong.append(f"num_target_layers {self.num_target_layers}, the target has {num_hidden_layers} layers")
        if self.mask_token_id >= vocab_size:
            wrong.append(f"mask_token_id {self.mask_token_id}, the target's vocabulary is {vocab_size}")
        if max(self.target_layer_ids) >= num_hidden_layers:
            wrong.append(
                f"target_layer_ids {list(self.target_layer_ids)}, the target's layers are 0 to {num_hidden_layers - 1}"
            )
        if vocab_size != self.vocab_size:
            wrong.append(f"vocab_size {self.vocab_size}, the target has {vocab_size}")
        if wrong:
            raise SpecflowConfigError(
                given=f"a draft head for another target than {name}: {'; '.join(wrong)}",
                allowed="a head whose config.json agrees with the target's",
                todo="give the head that was trained for this target",
            )


class _Fields:
    """Typed access to a head's `config.json`; `dflash_config` comes before the top level. Refuses by field name."""

    def __init__(self, raw: dict[str, Any], source: str):
        self.raw, self.source, self.dflash = raw, source, raw.get("dflash_config") or {}

    def refuse(self, given: str, allowed: str, todo: str = "mend config.json or give another head") -> None:
        raise SpecflowConfigError(given=f"{given} in {self.source}", allowed=allowed, todo=todo)

    def get(self, name: str) -> Any:
        return self.dflash.get(name, self.raw.get(name))

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(f"{name} {value!r}", "true or false")
        return bool(value)

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(f"{name} {value!r}", f"an integer of at least {least}")
        return value

    def rope(self, head_dim: int) -> tuple[float, int]:
        """(theta, rotated dimensions a head) as SGLang 0.5.23 reads them: `rope_parameters` before `rope_theta`."""
        scaling = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ("default", "mrope"):
            self.refuse(f"rope type {kind!r}", "'default' (positions are one-dimensional here, so 'mrope' is the same)")
        rotary_dim = scaling.get("rope_dim") or int(head_dim * self.raw.get("partial_rotary_factor", 1.0))
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            self.refuse(f"RoPE over {rotary_dim} dimensions a head", f"an even number up to head_dim {head_dim}")
        return float(scaling.get("rope_theta", self.raw.get("rope_theta", 10000.0))), rotary_dim

    def check(self, config: HeadConfig) -> None:
        """What must hold between fields."""
        if (activation := self.raw.get("hidden_act", "silu")) != "silu":
            self.refuse(f"hidden_act {activation!r}", "'silu'")
        if (dtype := self.raw.get("dtype", self.raw.get("torch_dtype"))) not in (None, *DTYPES):
            self.refuse(f"dtype {dtype!r}", f"one of {list(DTYPES)}")
        if config.block_size > config.max_position_embeddings:
            self.refuse(
                f"block_size {config.block_size}", f"at most max_position_embeddings {config.max_position_embeddings}"
            )
        if config.num_attention_heads % config.num_key_value_heads:
            self.refuse(
                f"num_key_value_heads {config.num_key_value_heads}", f"a divisor of {config.num_attention_heads} heads"
            )
        if len(config.layer_types) != config.num_hidden_layers or not set(config.layer_types) <= set(LAYER_TYPES):
            self.refuse(f"layer_types {list(config.layer_types)}", f"{config.num_hidden_layers} of {list(LAYER_TYPES)}")
        if "sliding_attention" in config.layer_types and not config.sliding_window:
            self.refuse(
                f"sliding_window {config.sliding_window!r} beside sliding_attention layers", "a positive integer"
            )
        if config.mask_token_id >= config.vocab_size:
            self.refuse(
                f"mask_token_id {config.mask_token_id}", f"a token of the vocabulary, 0 to {config.vocab_size - 1}"
            )
        layers = config.target_layer_ids
        ascending = all(below < above for below, above in zip(layers, layers[1:]))
        if not layers or not ascending or not all(0 <= layer < config.num_target_layers for layer in layers):
            self.refuse(
                f"target_layer_ids {list(layers)}",
                f"layers of the target, 0 to {config.num_target_layers - 1}, in ascending order",
            )
        if (target_hidden := self.dflash.get("target_hidden_size", config.hidden_size)) != config.hidden_size:
            self.refuse(
                f"target_hidden_size {target_hidden}",
                f"hidden_size {config.hidden_size}, since the head uses the target's embedding and LM head",
            )
