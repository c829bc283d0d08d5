"""nanoscale: one YAML recipe, launched anywhere, the same model in every layout."""

__version__ = "0.1.0"
