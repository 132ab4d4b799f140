"""The on-disk forms: how a run and a packed model lie in a folder, written whole or not at all, validated when read."""
