"""Files of a draft head: which tensors it must hold, reading them, writing them. Checks read headers only."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sgl_specflow.drafter.config import FETCH_AGAIN, HeadConfig
from sgl_specflow.errors import SpecflowConfigError

INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 15 * 2**20


def expected_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the public format by name; linear weights are [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    shapes = {"fc.weight": (hidden, config.context_size), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for index in range(config.num_hidden_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_shapes(shapes: dict[str, tuple[int, ...]], config: HeadConfig, source: str) -> None:
    """Refuse missing, unexpected or wrongly shaped tensors, all named. Raises SpecflowConfigError."""
    compare_shapes(shapes, expected_shapes(config), source, "the DFlash format", FETCH_AGAIN)


def compare_shapes(
    shapes: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], source: str, layout: str, todo: str
) -> None:
    """Raise SpecflowConfigError unless `shapes` are those of `expected`, name by name; `layout` names the format."""
    problems = [f"missing {name} {list(expected[name])}" for name in expected if name not in shapes]
    problems += [f"unexpected {name} {list(shapes[name])}" for name in shapes if name not in expected]
    problems += [
        f"{name} is {list(shapes[name])} where the config asks for {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    if problems:
        listed = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise SpecflowConfigError(
            given=f"{source}, whose tensors do not fit its config: {listed}",
            allowed=f"exactly the tensors of {layout}, in the shapes that the config implies",
            todo=f"{todo}, or mend the config",
        )


def check_checkpoint(folder: str | Path) -> HeadConfig:
    """Read config.json and the safetensors headers of `folder`; return the config of a head that is whole.

    Raises SpecflowConfigError for a missing config, file or shard, a truncated file, and what `check_shapes` refuses.
    """
    config = HeadConfig.load(folder)
    check_shapes(stored_shapes(folder), config, str(folder))
    return config


def stored_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name from the safetensors headers of a folder. Same errors as `check_checkpoint`."""
    shapes = {}
    for path in _files(Path(folder)):
        with _opened(path) as file:
            shapes |= {_name(key): tuple(file.get_slice(key).get_shape()) for key in file.keys() if _is_weight(key)}
    return shapes


def load_tensors(folder: str | Path, dtype: torch.dtype | None = None, device: str = "cpu") -> dict[str, torch.Tensor]:
    """The tensors by the names of `expected_shapes`, in `dtype` (None: as stored), checked by `check_checkpoint`."""
    check_checkpoint(folder)
    return stored_tensors(folder, dtype, device)


def stored_tensors(
    folder: str | Path, dtype: torch.dtype | None = None, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files, unchecked."""
    tensors = {}
    for path in _files(Path(folder)):
        with _opened(path) as file:
            tensors |= {_name(key): file.get_tensor(key).to(device, dtype) for key in file.keys() if _is_weight(key)}
    return tensors


def save_head(folder: str | Path, config: HeadConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Write `config.raw` and `tensors` as a Hugging Face folder, in shards of at most 15 MiB. Same errors as a load."""
    check_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}, config, str(folder))
    save_sharded(folder, config.raw, {name: tensors[name] for name in expected_shapes(config)})


def save_sharded(folder: str | Path, raw_config: dict, tensors: dict[str, torch.Tensor]) -> None:
    """Write config.json and `tensors`, in their order, as safetensors shards of at most 15 MiB with an index."""
    folder = Path(folder)
    shards, size = [{}], 0
    for name in tensors:
        tensor = tensors[name].detach().cpu().contiguous()
        if shards[-1] and size + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (*folder.glob("model*.safetensors"), folder / INDEX):
        stale.unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n")
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for shard in shards for tensor in shard.values())},
            "weight_map": {name: file for file, shard in zip(names, shards) for name in shard},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for file, shard in zip(names, shards):
        save_file(shard, folder / file, metadata={"format": "pt"})


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        paths = [folder / file for file in sorted(_indexed_files(folder / INDEX))]
    else:
        paths = [folder / "model.safetensors"]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise SpecflowConfigError(
            given=f"half a checkpoint: {folder} lacks {', '.join(missing)}",
            allowed=f"model.safetensors, or {INDEX} and every file that it names",
            todo=FETCH_AGAIN,
        )
    return paths


def _indexed_files(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SpecflowConfigError(
            given=f"{index}, which cannot be read ({type(error).__name__}: {error})",
            allowed="the index that Hugging Face writes, with a weight_map",
            todo=FETCH_AGAIN,
        ) from error


def _opened(path: Path):
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise SpecflowConfigError(
            given=f"{path}, which is cut off or broken ({error})", allowed="a whole safetensors file", todo=FETCH_AGAIN
        ) from error


def _name(key: str) -> str:
    return key.removeprefix("model.")


def _is_weight(key: str) -> bool:
    """Rotary tables, which some exports store, are computed here."""
    return not key.endswith("rotary_emb.inv_freq")
