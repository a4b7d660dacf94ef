"""Diagnosis of a machine: problems that would stop a run, and how to fix them. Each file checks one part."""
