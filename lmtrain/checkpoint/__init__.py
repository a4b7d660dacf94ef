"""Saving and finding training state. The only package that uses Orbax."""
