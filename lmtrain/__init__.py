"""Pretrain language models in JAX: from raw text to a Hugging Face checkpoint.

Importing this package imports nothing else: each command loads only what it needs (see `lmtrain/cli.py`).
"""

__version__ = "0.1.0"
