"""Causal attention, softmax(q k^T * scale + bias) v, by one of several kernels.

Each kernel is a file or folder that exports its record `KERNEL`. To add one, write that file and add its name to
`names.py`. `attend.py` has the plain formula, `kernel.py` the record, the call of a kernel by its name, and the choice
for a run.
"""
