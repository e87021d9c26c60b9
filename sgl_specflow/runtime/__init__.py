"""Everything that touches the internals of SGLang, read from version 0.5.23."""
