"""`lmtrain doctor [PLACE ...]`: what a run would see here, each line ok or with the way to mend it."""

import itertools

from lmtrain.commands.arguments import Parser
from lmtrain.doctor.cluster import look_at_cluster
from lmtrain.doctor.devices import look_at_devices
from lmtrain.doctor.finding import State
from lmtrain.doctor.machine import look_at_machine
from lmtrain.doctor.services import look_at_place, look_at_services


def run(argv: list[str]) -> int:
    parser = Parser(
        "doctor",
        "Say what a run would see on this machine: devices, libraries, limits, other processes, storage, services. "
        "Exits with 1 if something would stop it.",
    )
    parser.add_argument(
        "places", nargs="*", metavar="PLACE", help="folders, buckets and files to try, as paths or URLs"
    )
    arguments = parser.parse_args(argv)
    bad = 0
    places = (look_at_place(place) for place in arguments.places)
    for finding in itertools.chain(look_at_machine(), look_at_devices(), look_at_cluster(), places, look_at_services()):
        print("\n".join(finding.lines()), flush=True)
        bad += finding.state is State.BAD
    print(f"{bad} would stop a run" if bad else "ready to train")
    return 1 if bad else 0
