"""The version of streampack, for the library and the services."""

__version__ = "0.2.0"
