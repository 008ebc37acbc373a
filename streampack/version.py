"""The version of streampack, for the library and the services."""

__version__ = "0.1.0"
