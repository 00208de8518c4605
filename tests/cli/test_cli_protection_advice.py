"""``holdfast advise --protect`` says what copies and parity cost and survive, on screen and as JSON."""

from __future__ import annotations

import time

import pytest

from tests.support.command_line import Done, holdfast_command

JOB = ("--protect", "480GB", "--nodes", "128")


def advised(*arguments: str) -> Done:
    done = holdfast_command("advise", *arguments)
    assert done.status == 0, done.err
    return done


def by_policy(done: Done) -> dict[str, dict[str, object]]:
    return {each["policy"]: each for each in done.json["policies"]}


def test_policies_stand_side_by_side() -> None:
    done = advised(*JOB, "--network", "200Gbit/s", "--domains", "16")
    assert done.lines[0] == "Snapshots of 447.0 GiB on each of 128 nodes, 2 generations."
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in done.lines[3:8]}
    assert rows == {
        "none": "894.1 GiB - - impossible - loses snapshots",
        "Copies(1)": "1.7 TiB 447.0 GiB 19.2 s 447.0 GiB 19.2 s loses nothing",
        "Copies(2)": "2.6 TiB 894.1 GiB 38.4 s 447.0 GiB 19.2 s loses nothing",
        "Parity(1)": "1.2 TiB 447.0 GiB 19.2 s 1.3 TiB 19.2 s loses nothing",
        "Parity(2)": "1.3 TiB 894.1 GiB 38.4 s 1.7 TiB 19.2 s loses nothing",
    }
    assert "  Copies(1)       100 %     99.21 %     97.64 %     95.29 %  " + 38 * "#" in done.lines
    assert "  Copies(2)     2.6 TiB  " + 40 * "#" in done.lines


def test_the_document_has_the_same_numbers() -> None:
    found = by_policy(advised(*JOB, "--network", "25GB/s", "--generations", "3", "--json"))
    assert list(found) == ["none", "Copies(1)", "Copies(2)", "Parity(1)", "Parity(2)"]
    assert found["Parity(2)"] == {
        "policy": "Parity(2)",
        "memory_nbytes": 3 * 720 * 10**9,
        "sent_nbytes": 960 * 10**9,
        "sent_s": pytest.approx(38.4),
        "rebuilt_nbytes": 1920 * 10**9,
        "rebuilt_s": pytest.approx(19.2),
        "survival": [1, 1, pytest.approx(0.9987, abs=5e-5), pytest.approx(0.9948, abs=5e-5)],
        "is_exact": True,
        "survives_domain": None,
    }
    assert found["none"]["survival"] == [0, 0, 0, 0]


def test_a_policy_that_the_job_cannot_have_is_explained() -> None:
    done = advised("--protect", "480GB", "--nodes", "8", "--domains", "2")
    assert "Copies(2) " in done.out
    assert "Parity(1) is not possible: the failure domains allow no placement" in done.out
    few = advised("--protect", "480GB", "--nodes", "2", "--json").json
    assert few["impossible"]["Copies(2)"] == "Copies(2) needs at least 3 nodes, but the job has 2."
    assert [each["survival"] for each in few["policies"]] == [[0, 0], [1, 0], [1, 0]]


def test_chances_in_domains_that_allow_no_groups_are_lower_limits() -> None:
    done = advised("--protect", "480GB", "--nodes", "8", "--domains", "2")
    (row,) = (line.split() for line in done.lines if line.startswith("  Copies(2)") and "%" in line)
    assert row[1:5] == ["100", "%", "100", "%"]
    assert row[5] == ">="


def test_a_domain_of_all_nodes_is_not_survived() -> None:
    found = by_policy(advised(*JOB, "--domains", "1", "--json"))
    assert [each["survives_domain"] for each in found.values()] == [False] * 5


def test_advice_for_2048_nodes_takes_less_than_a_second_of_a_core() -> None:
    started = time.process_time()
    advised("--protect", "480GB", "--nodes", "2048", "--domains", "64", "--json")
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--protect", "much", "--nodes", "8"), "[config.advice] --protect much is no size"),
        (("--protect", "0GB", "--nodes", "8"), "[config.advice] --protect 0GB is no size"),
        (("--protect", "1e400GB", "--nodes", "8"), "[config.advice] --protect 1e400GB is no size"),
        (("--protect", "1GB"), "[config.advice] nobody says how many nodes protect each other"),
        ((*JOB, "--domains", "129"), "[config.advice] 128 nodes cannot lie in 129 domains"),
        (
            ("--protect", "1GB", "--nodes", "20000", "--domains", "2"),
            "no advice has domains for more than 16,384 nodes",
        ),
        ((*JOB, "--network", "fast"), "[config.bandwidth] 'fast' is not a bandwidth"),
        ((*JOB, "--mttf", "3h"), "[config.option] --protect asks another question"),
        (("--durable", "3s,3min,5min", "--mttf", "3h", "--domains", "2"), "[config.option] --protect asks"),
    ],
)
def test_a_question_that_makes_no_sense_is_explained(options: tuple[str, ...], problem: str) -> None:
    done = holdfast_command("advise", *options)
    assert done.status == 2
    assert problem in done.err
