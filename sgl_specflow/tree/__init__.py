"""The token tree of one verify pass: its layout, and how it is built from marginals."""
