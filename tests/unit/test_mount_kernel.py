"""What a kernel's release says."""

import pytest

from mount.kernel import kernel_version


@pytest.mark.parametrize(
    ("release", "version"),
    [
        ("6.18.44-fc-v782", (6, 18)),
        ("5.10.0-28-amd64", (5, 10)),
        ("6.9-rc1", (6, 9)),
        ("strange", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_a_release_has_two_numbers(release: str, version: tuple[int, int]) -> None:
    assert kernel_version(release) == version
