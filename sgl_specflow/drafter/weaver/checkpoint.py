"""Files of a Weaver: the public torch file, and our safetensors folder. Nothing but tensors is ever unpickled."""

import json
import pickle
from pathlib import Path

import torch

from sgl_specflow.drafter.checkpoint import compare_shapes, save_sharded, stored_shapes, stored_tensors
from sgl_specflow.drafter.weaver.config import FETCH_AGAIN, MODEL_TYPE, WeaverConfig
from sgl_specflow.errors import SpecflowConfigError

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
PATTERNS = ["*.json", "*.safetensors", *(f"*{suffix}" for suffix in TORCH_SUFFIXES)]
LAYOUT = "a Weaver, as trymirai/weaver is laid out"
CHECK_PATH = "check the path"
ALLOWED = "a torch file with 'config' and 'state_dict', or a folder with config.json and safetensors files"


def expected_shapes(config: WeaverConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the public format by name; linear weights are [out, in]."""
    rank, inner = config.d_rank, config.mlp_dim
    shapes = {
        **_norm("embed_norm", config.d_embed),
        **_norm("output_norm", config.d_model),
        "token_in.weight": (rank, config.d_embed),
        "token_in.bias": (rank,),
        "proposal_in.weight": (rank, config.d_model),
        "proposal_in.bias": (rank,),
    }
    for index in range(config.num_layers):
        block = f"blocks.{index}"
        shapes |= {
            **_norm(f"{block}.norm_attn", rank),
            f"{block}.qkv_proj.weight": (3 * rank, rank),
            f"{block}.o_proj.weight": (rank, rank),
            **_norm(f"{block}.norm_mlp", rank),
            f"{block}.gate_up_proj.weight": (2 * inner, rank),
            f"{block}.gate_up_proj.bias": (2 * inner,),
            f"{block}.down_proj.weight": (rank, inner),
            f"{block}.down_proj.bias": (rank,),
        }
    return shapes | {**_norm("out_norm", rank), "lm_head_query_in.weight": (config.d_model, rank)}


def find_weaver(given: str | Path) -> Path:
    """The torch file or folder that `given` names; a hub id is fetched. Raises SpecflowConfigError."""
    try:
        path = Path(given).expanduser()
        if path.is_dir():
            return _inside(path)
        if path.is_file():
            return path
    except (OSError, RuntimeError) as error:  # a name too long, a folder not ours to read, a user without a home
        _refuse(f"the Weaver {str(given)[:200]}, which cannot be looked up ({error})"[:600], ALLOWED, CHECK_PATH)
    text = str(given)
    if path.is_absolute() or text.startswith(".") or text.count("/") != 1 or path.suffix in TORCH_SUFFIXES:
        _refuse(
            f"the Weaver {given}, which is no file and no folder",
            f"{ALLOWED}, or a hub id of the form owner/name",
            CHECK_PATH,
        )
    from huggingface_hub import snapshot_download

    try:
        return _inside(Path(snapshot_download(text, allow_patterns=PATTERNS)))
    except SpecflowConfigError:
        raise
    except Exception as error:  # the hub raises a dozen kinds; each means the same to the user
        raise SpecflowConfigError(
            given=f"the Weaver {given}, which could not be fetched ({error})",
            allowed="a file, a folder, or a hub id that this machine reaches",
            todo="check the name and the network, unset HF_HUB_OFFLINE, or download it and give its path",
        ) from error


def load_weaver_config(path: str | Path) -> WeaverConfig:
    """The config of what `find_weaver` gave, with every tensor's shape checked. Raises SpecflowConfigError."""
    path = Path(path)
    if not path.is_dir():
        return _read_torch_file(path)[0]
    config = WeaverConfig.from_dict(_read_json(path / "config.json"), str(path / "config.json"))
    compare_shapes(stored_shapes(path), expected_shapes(config), str(path), LAYOUT, FETCH_AGAIN)
    return config


def load_weaver(
    path: str | Path, dtype: torch.dtype | None = None, device: str = "cpu"
) -> tuple[WeaverConfig, dict[str, torch.Tensor]]:
    """(config, tensors by the names of `expected_shapes`) in `dtype` (None: as stored), all checked.

    Args:
        path: a torch file (`{"config", "state_dict"}`) or a folder that `save_weaver` wrote.

    Raises SpecflowConfigError for a file that cannot be read, that wants more than tensors and plain values unpickled,
    whose config is refused by `WeaverConfig`, or whose tensors are not exactly those of its config, or no finite numbers:
    of NaN the tree would be the root alone, step by step, and nobody told.
    """
    path = Path(path)
    if path.is_dir():
        config, tensors = load_weaver_config(path), stored_tensors(path)
    else:
        config, tensors = _read_torch_file(path)
    finite = lambda tensor: tensor.is_floating_point() and tensor.float().isfinite().all()
    wrong = [name for name, tensor in tensors.items() if not finite(tensor)]
    if wrong:
        _refuse(f"{path}, with values that are no finite numbers in {', '.join(wrong[:8])}", "finite weights")
    return config, {name: tensor.to(device, dtype) for name, tensor in tensors.items()}


def save_weaver(folder: str | Path, config: WeaverConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Write config.json and safetensors shards of at most 15 MiB. Same errors as a load."""
    expected = expected_shapes(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    compare_shapes(shapes, expected, str(folder), LAYOUT, "give all tensors")
    save_sharded(folder, {"model_type": MODEL_TYPE, **config.to_dict()}, {name: tensors[name] for name in expected})


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _inside(folder: Path) -> Path:
    """The folder itself where it is a safetensors export, else its only torch file."""
    if (folder / "config.json").is_file() and list(folder.glob("*.safetensors")):
        return folder
    files = sorted(file for file in folder.iterdir() if file.suffix in TORCH_SUFFIXES)
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "neither"
        _refuse(f"the folder {folder} as a Weaver, which holds {found}", f"{ALLOWED}, one of them", "give the file")
    return files[0]


def _read_torch_file(path: Path) -> tuple[WeaverConfig, dict[str, torch.Tensor]]:
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise SpecflowConfigError(
            given=f"{path}, which is no torch file of tensors or wants code run to be read ({_first_line(error)})",
            allowed="a torch file that holds tensors and plain values only (it is read with weights_only=True)",
            todo="get it from a source you trust and save it again as {'config': dict, 'state_dict': dict of tensors}",
        ) from error
    except Exception as error:  # torch's unpickler raises whatever the bytes lead it to
        raise SpecflowConfigError(
            given=f"{path}, which cannot be read ({_first_line(error)})", allowed=ALLOWED, todo=FETCH_AGAIN
        ) from error
    if not isinstance(payload, dict) or not isinstance(payload.get("state_dict"), dict) or "config" not in payload:
        _refuse(f"{path}, which is no Weaver", ALLOWED)
    config = WeaverConfig.from_dict(payload["config"], f"the config in {path}")
    tensors = payload["state_dict"]
    if others := [str(name) for name, tensor in tensors.items() if not isinstance(tensor, torch.Tensor)]:
        _refuse(f"{path}, whose state_dict holds no tensor at {', '.join(others[:8])}", ALLOWED)
    dense = lambda tensor: tensor.is_floating_point() and tensor.layout == torch.strided and not tensor.is_meta
    if others := [str(name) for name, tensor in tensors.items() if not dense(tensor)]:
        _refuse(f"{path}, whose tensors {', '.join(others[:8])} are no dense floating-point weights", ALLOWED)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    compare_shapes(shapes, expected_shapes(config), str(path), LAYOUT, FETCH_AGAIN)
    return config, tensors


def _read_json(path: Path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise SpecflowConfigError(
            given=f"{path}, which cannot be read ({type(error).__name__}: {error})",
            allowed="a JSON object with the keys of a Weaver's config",
            todo=FETCH_AGAIN,
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _refuse(given: str, allowed: str, todo: str = FETCH_AGAIN) -> None:
    raise SpecflowConfigError(given=given, allowed=allowed, todo=todo)
