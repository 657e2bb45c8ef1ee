"""The warning about old Linux kernels."""

import platform

import pytest

from accelerate.base.system import check_os_kernel


@pytest.mark.parametrize(
    ("system", "release", "warns"),
    [
        ("Linux", "5.4.0-150-generic", True),
        ("Linux", "4.19", True),
        ("Linux", "5.5.0", False),
        ("Linux", "6.1.0-13-amd64", False),
        ("Linux", "strange", False),
        ("Darwin", "4.0", False),
    ],
)
def test_old_kernels_are_warned_about(system, release, warns, monkeypatch, caplog):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: release)
    check_os_kernel()
    assert [release in record.getMessage() for record in caplog.records] == [True] * warns
