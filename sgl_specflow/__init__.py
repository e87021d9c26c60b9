"""Tree speculative decoding for SGLang: JetFlow, DDTree and DFlash-TfM as a plugin."""

__version__ = "0.1.0"
