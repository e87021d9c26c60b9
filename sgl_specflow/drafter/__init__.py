"""Draft heads: configuration, reference forward, and the parallel head inside SGLang."""
