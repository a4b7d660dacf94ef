"""What a run will need on devices that are not here: compiled by their own compilers, in processes of their own.

`request.py` says what is asked, `worker.py` answers it in a process that sees only the target's platform, and
`answers.py` starts workers and keeps their answers. `search.py` tries other settings, `report.py` prints.
"""
