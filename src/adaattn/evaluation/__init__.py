"""Quality of approximations on real models and texts."""
