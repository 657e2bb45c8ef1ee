from __future__ import annotations

import pytest

from accelerate.test_utils.scripts import test_script as script

pytestmark = pytest.mark.usefixtures("states")


def broken(accelerator: object) -> None:
    script.expect(False, "something is wrong")


def crashing(accelerator: object) -> None:
    raise ZeroDivisionError("a bug")


def fine(accelerator: object) -> None:
    script.expect(True, "never said")


def run(monkeypatch: pytest.MonkeyPatch, **checks: object) -> int:
    monkeypatch.setattr(script, "CHECKS", checks)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(SystemExit) as caught:
        script.main()
    return int(caught.value.code or 0)


def test_a_failed_check_is_named_and_makes_the_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, fine=fine, broken=broken, crashing=crashing) == 1
    out = capsys.readouterr().out
    assert "    ok  fine" in out
    assert "FAILED  broken\n        process 0: CheckFailedError: something is wrong" in out
    assert "FAILED  crashing\n        process 0: ZeroDivisionError: a bug" in out
    assert "2 of 3 checks failed." in out


def test_the_exit_code_is_0_when_every_check_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, fine=fine) == 0
    assert "All checks passed." in capsys.readouterr().out
