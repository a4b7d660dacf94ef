"""`lmtrain doctor [PLACE ...]`: diagnose this machine; each line is ok or says how to fix it."""

import itertools

from lmtrain.commands.arguments import Parser
from lmtrain.doctor.cluster import look_at_cluster
from lmtrain.doctor.devices import look_at_devices
from lmtrain.doctor.machine import look_at_machine
from lmtrain.doctor.services import look_at_place, look_at_services


def run(argv: list[str]) -> int:
    parser = Parser(
        "doctor",
        "Check this machine: devices, libraries, limits, other processes, storage, services. "
        "Exits with 1 if a problem would stop a run.",
    )
    parser.add_argument(
        "places", nargs="*", metavar="PLACE", help="folders, buckets and files to test, as paths or URLs"
    )
    arguments = parser.parse_args(argv)
    bad = 0
    places = (look_at_place(place) for place in arguments.places)
    for finding in itertools.chain(look_at_machine(), look_at_devices(), look_at_cluster(), places, look_at_services()):
        print("\n".join(finding.lines()), flush=True)
        bad += finding.state == "BAD"
    print(f"{bad} blocking problem{'s' if bad > 1 else ''}" if bad else "ready to train")
    return 1 if bad else 0
