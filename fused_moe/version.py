"""The version, in a file of its own: what imports it needs nothing else of the package."""

__version__ = "0.3.0"
