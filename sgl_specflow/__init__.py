"""Tree speculative decoding for SGLang: JetFlow, DDTree and DFlash-TfM as a plugin."""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout kernels/, launch/ and eval/ lie beside this folder. A wheel holds them inside it; setuptools' editable
# finder cannot place a folder without __init__.py under a regular package, so the checkout joins the search path here.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "launch" / "environment.sh").is_file():
    __path__.append(str(_checkout))
