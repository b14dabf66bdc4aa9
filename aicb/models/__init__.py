"""Where a model comes from besides the presets: our TOML files and Hugging Face's config.json.

Each reader returns ModelConfig's fields for `make_model` and warnings; what cannot be described is an error. A new
architecture is an entry in architectures.py.
"""
