"""Saving and finding training state. The only room that knows Orbax."""
