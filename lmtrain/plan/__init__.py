"""Plan a run for devices that need not be present: compiled by the devices' own compilers, in separate processes.

`request.py` defines a request, `worker.py` answers it in a process that sees only the target's platform, and
`answers.py` starts workers and caches their answers. `search.py` tries other settings, `report.py` prints.
"""
