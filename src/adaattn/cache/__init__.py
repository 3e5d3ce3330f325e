"""Keys and values of earlier tokens: position and storage, no attention inside."""

from adaattn.backends.keys_values import KeysValues
from adaattn.cache.interface import LayerCache
from adaattn.cache.kv_cache import KVCache

__all__ = ["KVCache", "KeysValues", "LayerCache"]
