# SPDX-License-Identifier: Apache-2.0
import hashlib

import pytest

from fake_fork import DISTRIBUTION, FILES, FakeFork, make_wheel
from fork_build.errors import BuildError
from fork_build.fetch import pip_command
from fork_build.pins import PIN_FILE, REPOSITORY, WheelPin, load_pins
from fork_build.rebase import MACHINES, rebase, rewrite


def publish(fork: FakeFork, version: str, *machines: str) -> dict[str, str]:
    wheels = [
        make_wheel(
            fork.index, version, FILES, tag=f"cp38-abi3-manylinux_2_28_{machine}"
        )
        for machine in machines
    ]
    return {
        wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels
    }


def test_resolves_each_machine_and_rewrites_the_pins(fork: FakeFork) -> None:
    expected = publish(fork, "2.0", *MACHINES)
    pins = rebase(fork.root, "2.0", pip_command())
    assert pins.version == "2.0"
    target = pins.targets["cpu"]
    assert {wheel.file: wheel.sha256 for wheel in target.wheels} == expected
    assert target.distribution == DISTRIBUTION
    assert fork.build().lay()


def test_missing_machine_leaves_the_pins(fork: FakeFork) -> None:
    before = (fork.root / PIN_FILE).read_text()
    publish(fork, "2.0", MACHINES[0])
    with pytest.raises(BuildError, match=f"no wheel.*2.0 for Linux {MACHINES[1]}"):
        rebase(fork.root, "2.0", pip_command())
    assert (fork.root / PIN_FILE).read_text() == before


def test_malformed_version(fork: FakeFork) -> None:
    with pytest.raises(BuildError, match="VERSION='next; ls' is no version"):
        rebase(fork.root, "next; ls", pip_command())


def test_rewrite_keeps_all_else_of_the_real_file() -> None:
    text = (REPOSITORY / PIN_FILE).read_text()
    pins = load_pins(REPOSITORY)
    same = {name: list(target.wheels) for name, target in pins.targets.items()}
    assert rewrite(text, pins.version, same) == text
    other = {name: [WheelPin("a-1-x-y-z.whl", "0" * 64)] for name in pins.targets}
    changed = rewrite(text, "9.9.9", other)
    assert 'version = "9.9.9"\n' in changed
    assert changed.count('"a-1-x-y-z.whl" = ') == len(pins.targets)
    assert pins.targets["cpu"].wheels[0].file not in changed
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert comments == [line for line in changed.splitlines() if line.startswith("#")]


def test_rewrite_refuses_an_unknown_layout() -> None:
    with pytest.raises(BuildError, match="one line `version"):
        rewrite("nothing = 1\n", "1.0", {})
    with pytest.raises(BuildError, match=r"targets\.cpu\.wheels.*missing"):
        rewrite('version = "1"\n', "1.0", {"cpu": []})
