"""`lmtrain doctor` as a user runs it."""


def test_a_machine_without_problems_exits_with_0_and_each_line_has_a_state(lmtrain, tmp_path):
    done = lmtrain("doctor", tmp_path / "checkpoints")
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == "ready to train"
    assert {line.split()[0] for line in lines} <= {"ok", "note", "->"}
    assert any(
        line.startswith(
            f"ok   storage      {tmp_path}/checkpoints: does not exist yet, can be created; {tmp_path}: written"
        )
        for line in lines
    )
    assert done.stderr == ""


def test_an_unusable_place_exits_with_1(lmtrain):
    done = lmtrain("doctor", "/proc/nothing")
    assert done.returncode == 1
    assert "BAD  storage      /proc/nothing: " in done.stdout
    assert done.stdout.splitlines()[-1] == "1 blocking problem"
