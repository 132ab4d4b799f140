"""Running models: packed folders opened, caches of keys and values, the engine that generates."""
