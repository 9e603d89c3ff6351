"""Recognise fine-grained things from a few photos of each, and see which parts decided."""

__version__ = "0.1.0"
