"""kvgate: measures KV-cache eviction policies against exact full-KV runs and decides which may be enabled."""

__version__ = "0.1.0"
