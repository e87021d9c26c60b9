"""The configuration of a Weaver adapter, in the keys of the public checkpoint (the layout of trymirai/weaver)."""

from dataclasses import dataclass
from typing import Any

from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.errors import SpecflowConfigError

MODEL_TYPE = "dflash_tfm_weaver"
WHOLE = ("d_model", "d_embed", "d_rank", "num_layers", "num_heads", "mlp_dim", "K", "candidate_pool_size")
# Keys of the public constructor that stand for other architectures, and the only values that are this one.
NEUTRAL = {"encoder_mode": 3, "score_head": 4, "activation": "swiglu", "model_type": MODEL_TYPE}
MOST_ROPE_BASE = 1e30  # its powers are float32
FETCH_AGAIN = "download the Weaver again"


@dataclass(frozen=True)
class WeaverConfig:
    """Shape of a Weaver.

    Attributes:
        d_model: width of the target's and the head's hidden states, and of the LM head's rows.
        d_embed: width of the target's embedding.
        d_rank: the adapter's own width; num_layers, num_heads and mlp_dim are its transformer's.
        depth: K, the head's depths that the prefix holds, hence the greatest depth of a tree.
        candidate_pool_size: tokens that compete at a depth.
        rope_base: theta of the rotary positions.
    """

    d_model: int
    d_embed: int
    d_rank: int
    num_layers: int
    num_heads: int
    mlp_dim: int
    depth: int
    candidate_pool_size: int
    rope_base: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.d_rank // self.num_heads

    @classmethod
    def from_dict(cls, raw: Any, source: str = "config") -> "WeaverConfig":
        """Parse the public keys; `source` names them in errors. Raises SpecflowConfigError for a key that is missing,
        unknown or not of its kind, and for a shape that no Weaver has."""
        if not isinstance(raw, dict):
            _refuse(f"{source}, which is {type(raw).__name__}", "an object with the keys of a Weaver's config")
        known = {*WHOLE, *NEUTRAL, "rope_base"}
        if unknown := sorted(str(key) for key in raw if key not in known):
            _refuse(f"{source} with the unknown keys {', '.join(unknown)}", ", ".join(sorted(known)))
        for key in WHOLE:
            value = raw.get(key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                _refuse(f"{source} with {key} {value!r}", f"{key}: an integer of at least 1")
        for key, only in NEUTRAL.items():
            value = raw.get(key, only)
            if not isinstance(value, (int, str)) or value != only:
                _refuse(f"{source} with {key} {raw[key]!r}", f"{key} {only!r}", "give a Weaver of that kind")
        base = raw.get("rope_base", 10000.0)
        if isinstance(base, bool) or not isinstance(base, (int, float)) or not 0 < base < MOST_ROPE_BASE:
            _refuse(f"{source} with rope_base {base!r}", f"rope_base: a number above 0 and below {MOST_ROPE_BASE:g}")
        if raw["d_rank"] % (2 * raw["num_heads"]):
            _refuse(
                f"{source} with d_rank {raw['d_rank']} and num_heads {raw['num_heads']}",
                "d_rank: an even number of dimensions a head",
            )
        values = {("depth" if key == "K" else key): raw[key] for key in WHOLE}
        return cls(**values, rope_base=float(base))

    def to_dict(self) -> dict[str, Any]:
        """The public keys, as `from_dict` reads them."""
        return {key: getattr(self, "depth" if key == "K" else key) for key in WHOLE} | {"rope_base": self.rope_base}

    def check_against(self, head: HeadConfig, embedding_size: int, source: str = "the Weaver") -> None:
        """Refuse a head or target for which this adapter was not made. Raises SpecflowConfigError, naming the field.

        Args:
            head: the DFlash head whose outputs the adapter reads; it has the target's hidden size.
            embedding_size: columns of the target's embedding.
            source: the adapter's path, for the message.
        """
        wrong = []
        if head.causal_head:
            wrong.append("the head is causal (JetFlow), a Weaver reads a bidirectional one")
        if self.d_model != head.hidden_size:
            wrong.append(f"d_model {self.d_model}, the head and target have hidden_size {head.hidden_size}")
        if self.d_embed != embedding_size:
            wrong.append(f"d_embed {self.d_embed}, the target's embedding has {embedding_size}")
        if self.depth > head.depth:
            wrong.append(f"K {self.depth}, the head predicts {head.depth} depths")
        if self.candidate_pool_size > head.vocab_size:
            wrong.append(f"candidate_pool_size {self.candidate_pool_size}, the vocabulary has {head.vocab_size}")
        if wrong:
            raise SpecflowConfigError(
                given=f"{source}, made for another head or target: {'; '.join(wrong)}",
                allowed="a Weaver whose config agrees with the DFlash head and the target",
                todo="give the Weaver that was trained on this head",
            )


def _refuse(given: str, allowed: str, todo: str = FETCH_AGAIN) -> None:
    raise SpecflowConfigError(given=given, allowed=allowed, todo=todo)
