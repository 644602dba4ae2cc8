"""The names of a capsule's files, and the number of their format."""

from __future__ import annotations

FORMAT = 1
MANIFEST, TENSORS, SUMS = "capsule.json", "tensors.safetensors", "SHA256SUMS"
