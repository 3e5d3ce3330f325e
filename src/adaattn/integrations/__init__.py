"""One module for each host framework; each is installed by an explicit ``register()``."""
