"""The words of mount(8) and fstab, and what becomes of them."""

from pathlib import Path

import pytest

from kvfs import cli
from kvfs.errors import InvalidInput
from kvfs.shell.mount8 import (
    HelperCall,
    MountOptions,
    is_helper_call,
    parse_helper_call,
    parse_options,
    split_options,
)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", []),
        ("a,b=1,,c", ["a", "b=1", "c"]),
        (r"store=/a\,b,x", ["store=/a,b", "x"]),
        ('store="/a,b",x', ["store=/a,b", "x"]),
        (r"a\\,b", ["a\\", "b"]),
    ],
)
def test_splitting(text: str, options: list[str]) -> None:
    assert split_options(text) == options


def test_options_that_are_followed() -> None:
    text = "rw,allow_other,store=/b,store=/c,max_bytes=80%,tokenizer=/t,config=/f,noexec,ro"
    text += ",no_passthrough,symlink"
    assert parse_options(text) == MountOptions(
        stores=(Path("/b"), Path("/c")),
        config=Path("/f"),
        max_bytes="80%",
        tokenizer=Path("/t"),
        allow_other=True,
        passthrough=False,
        symlink=True,
        flags=("noexec", "ro"),
    )


@pytest.mark.parametrize("text", ["ro,rw", "noexec,exec", "sync,async", "noatime,atime"])
def test_the_last_of_two_that_contradict_counts(text: str) -> None:
    assert parse_options(text) == MountOptions()


def test_options_of_others_change_nothing() -> None:
    text = (
        "defaults,rw,auto,noauto,nofail,_netdev,user,default_permissions,nosuid,dev,suid,relatime,"
        "x-systemd.automount,x-systemd.requires=nvme.mount,comment=systemd.automount"
    )
    assert parse_options(text) == MountOptions()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("max_read=4096", "kvfs has none such"),
        ("uid=5", "allow_other, no_passthrough, symlink, ro,"),
        ("max_bytes=", "has no value"),
        ("max_bytes", "kvfs has none such"),
        ("remount", "unmount it and mount it again"),
    ],
)
def test_options_that_are_refused(option: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as raised:
        parse_options(f"rw,{option},allow_other")
    assert option in str(raised.value)


@pytest.mark.parametrize(
    ("program", "words", "is_call"),
    [
        ("mount.fuse.kvfs", [], True),
        ("mount.kvfs", ["x"], True),
        ("kvfs", ["/nvme/kvfs", "/mnt", "-o", "rw"], True),
        ("kvfs", ["kvfs:/nvme/kvfs", "/mnt"], True),
        ("kvfs", ["mount", "/mnt"], False),
        ("kvfs", ["/nvme/kvfs"], False),
        ("kvfs", [], False),
    ],
)
def test_who_calls(program: str, words: list[str], is_call: bool) -> None:
    assert is_helper_call(program, words) is is_call


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("/s /m", HelperCall(("mount", "--store", "/s", "--", "/m"), False)),
        (
            "/s /m -o rw,allow_other -t fuse.kvfs",
            HelperCall(("mount", "--store", "/s", "-o", "rw,allow_other", "--", "/m"), False),
        ),
        ("-n -v kvfs:/s%20 /m", HelperCall(("mount", "--store", "/s ", "--", "/m"), False)),
        ("/s /m -f -r", HelperCall(("mount", "--store", "/s", "-o", "ro", "--", "/m"), True)),
        (
            "/s /m -s -o uid=3,allow_other,remount",
            HelperCall(("mount", "--store", "/s", "-o", "allow_other", "--", "/m"), False),
        ),
    ],
)
def test_calls(words: str, call: HelperCall) -> None:
    assert parse_helper_call(words.split()) == call


@pytest.mark.parametrize(
    "words", ["", "/s", "/s /m /x", "/s /m -o", "/s /m -q", "s /m", "none /m", "/s /m -N 5", "/s -"]
)
def test_calls_that_are_refused(words: str) -> None:
    with pytest.raises(InvalidInput):
        parse_helper_call(words.split())


def test_exit_codes_are_those_of_mount8(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["/sbin/mount.fuse.kvfs", *words])
        return cli.main()

    ran: list[tuple[str, list[str]]] = []
    monkeypatch.setitem(
        cli.COMMANDS, "mount", lambda arguments: ran.append((str(arguments.mountpoint), [])) or 0
    )
    assert run("/s", "/m", "-o", "rw,noauto") == 0
    assert ran == [("/m", [])]
    assert run("/s", "/m", "-o", "rw", "-f") == 0
    assert len(ran) == 1
    assert run("/s", "/m", "-o", "nonsense") == 1
    assert "mount.fuse.kvfs: option nonsense: kvfs has none such" in capsys.readouterr().err
    monkeypatch.setitem(cli.COMMANDS, "mount", lambda arguments: 2)
    assert run("/s", "/m") == 32
