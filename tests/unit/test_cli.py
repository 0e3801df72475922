"""The words of the command: what is refused, with which exit code and in how many lines."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs import __version__, cli
from kvfs.errors import InvalidInput, NamespaceError, Unavailable
from kvfs.settings.sizes import Share
from kvfs.settings.words import PrefetchConfig
from kvfs.shell.mount8 import parse_options
from kvfs.shell.operate import CONFIG_TEMPLATE, configure, with_mount_options


def run(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    try:
        code = cli.main(words)
    except SystemExit as end:  # argparse leaves this way
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("lss",),
        ("ls", "--bla"),
        ("ls", "a", "b"),
        ("prefixes", "--limit", "-1"),
        ("prefixes", "--depth", "x"),
        ("serve", "--idle-exit", "nan"),
        ("serve", "--idle-exit", "0"),
        ("explain", "--model", "m"),
        ("explain", "--model", "m", "--text", "a", "--tokens", "b"),
        ("mount",),
        ("config",),
        ("config", "sglang"),
        ("pin",),
        ("pin", "a", ""),
        ("ls", ""),
        ("ls", "--store", ""),
        ("show", ""),
        ("prefixes", ""),
        ("mount", ""),
        ("mount", "m", "--store", ""),
        ("serve", "--config", ""),
        ("serve", "--max-bytes", ""),
        ("umount", ""),
        ("init", ""),
        ("explain", "--model", "", "--tokens", "b"),
        ("config", "vllm", "--store", ""),
    ],
)
def test_wrong_words_are_one_line_and_code_2(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(*words, capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith("kvfs") and err.count("\n") == 1 and "--help" in err


def test_what_a_name_has_to_tell_a_terminal_stays_untold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = os.fsdecode(b"no\x1b[31m\xffstore")
    code, out, err = run("ls", "--store", str(tmp_path / name), capsys=capsys)
    assert (code, out) == (2, "")
    assert r"no\x1b[31m\xffstore" in err and err.count("\n") == 1


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version", capsys=capsys) == (0, f"kvfs {__version__}\n", "")
    for words in (("--help",), *((name, "--help") for name in cli.COMMANDS)):
        code, out, err = run(*words, capsys=capsys)
        assert (code, err) == (0, "") and "usage: kvfs" in out


def test_a_store_that_does_not_exist_is_not_created(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "none"
    for command in ("status", "ls", "du", "verify", "gc", "prefixes"):
        code, out, err = run(command, "--store", str(store), capsys=capsys)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1 and str(store) in err and "kvfs init" in err
    assert not store.exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NamespaceError(errno.ENOENT, b"/x\n\xff"), 1),
        (NamespaceError(errno.EACCES, b"/x"), 2),
        (InvalidInput("x", "is\nbad"), 2),
        (Unavailable("no node"), 2),
        (PermissionError(errno.EACCES, "Permission denied", "/s"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_error_has_its_code_and_one_line(
    error: BaseException,
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(arguments: object) -> int:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "status", fail)
    found, out, err = run("status", capsys=capsys)
    assert (found, out) == (code, "")
    assert err.count("\n") == (0 if isinstance(error, KeyboardInterrupt) else 1)


def test_a_look_at_the_words_imports_nothing_heavy() -> None:
    script = (
        "import sys; from kvfs.shell.arguments import build_parser; import kvfs.cli, kvfs.shell;"
        "build_parser(); print(*sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    heavy = {"trio", "lmdb", "torch", "rich", "numpy", "tokenizers", "pyfuse3", "asyncio", "mount"}
    assert heavy.isdisjoint(ran.stdout.split())


def test_a_closed_pipe_is_quiet() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "kvfs", "config", "vllm", "--store", "/s"],
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writing)
    assert (ran.returncode, ran.stderr) == (141, b"")


# init and configuration ---------------------------------------------------------------------------
def test_init_makes_a_store_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "deep" / "store"
    code, out, _ = run("init", str(store), capsys=capsys)
    assert code == 0 and f"kvfs mount MOUNTPOINT --store {store}" in out
    assert store.stat().st_mode & 0o777 == 0o700
    before = (store / "kvfs.toml").read_text()
    code, _, err = run("init", str(store), capsys=capsys)
    assert code == 2 and "already" in err
    assert (store / "kvfs.toml").read_text() == before


def test_init_leaves_other_peoples_directories_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").touch()
    code, _, err = run("init", str(tmp_path), capsys=capsys)
    assert code == 2 and "not empty" in err
    assert [item.name for item in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_template_is_the_default_configuration(tmp_path: Path) -> None:
    plain = configure(None, [tmp_path], None, None)
    (tmp_path / "kvfs.toml").write_text(CONFIG_TEMPLATE.format(store=tmp_path))
    assert configure(None, [tmp_path], None, None) == plain


def test_every_commented_key_of_the_template_is_known(tmp_path: Path) -> None:
    lines = CONFIG_TEMPLATE.format(store=tmp_path).splitlines()
    keys = [line.removeprefix("# ") for line in lines if " = " in line or "[[" in line]
    [other] = [key for key in keys if key.startswith("metadata_file")]
    assert 'metadata_file = "/' in other
    keys.remove(other)  # instead of `metadata`, not beside it
    at, end = keys.index("[[tiers]]"), keys.index("expected = true")
    tiers, keys = keys[at:end], keys[:at] + keys[end:]
    (tmp_path / "kvfs.toml").write_text("\n".join([*_tables_last(keys), *tiers]))
    config = configure(None, [tmp_path], None, None)
    assert [d.path for d in config.directories] == [tmp_path, Path("/mnt/nvme1/kvfs")]
    assert config.socket_mode == 0o600
    assert config.cluster is not None and config.cluster.listen == "10.0.0.7:7400"
    assert [tier.name for tier in config.tiers] == ["scratch", "bucket"]
    assert [(rule.prefix, rule.copies) for rule in config.tier_rules] == [(b"kv/", 1)]
    assert config.prefetch == PrefetchConfig()  # the template shows what holds without it


@pytest.mark.parametrize(
    ("own", "options", "is_symlink"),
    [("", "", False), ("", "symlink", True), ("symlink = true", "", True)],
)
def test_links_are_asked_for_by_file_or_option(
    tmp_path: Path, own: str, options: str, is_symlink: bool
) -> None:
    (tmp_path / "kvfs.toml").write_text(f"[mount]\n{own}\n")
    config = configure(None, [tmp_path], None, None)
    assert with_mount_options(config, parse_options(options)).mount.symlink is is_symlink


def _tables_last(keys: list[str]) -> list[str]:
    at = keys.index("[[store]]")
    tables = {
        "[mount]": ("allow_other", "passthrough", "read_ahead", "symlink"),
        "[cluster]": (
            "metadata", "name", "listen", "bulk_port", "insecure", "encrypt_bulk", "copy_after",
        ),
        "[prefetch]": ("expected", "children", "successors", "full_at"),
    }  # fmt: skip
    last = [
        line
        for table, names in tables.items()
        for line in [table, *(key for key in keys if key.startswith(names))]
    ]
    return [*keys[:at], *(key for key in keys[at:] if key not in last), *last]


def test_a_stores_own_file_counts_when_no_other_is_named(tmp_path: Path) -> None:
    (tmp_path / "kvfs.toml").write_text('max_bytes = "10%"\nfsync = true\n')
    config = configure(None, [tmp_path], None, 5.0)
    assert config.fsync and config.idle_exit_s == 5.0
    assert config.directories[0].max_bytes == Share(0.1)
    assert configure(None, [tmp_path], "1MiB", None).directories[0].max_bytes == 2**20


def test_a_stores_own_file_may_add_directories_but_not_replace_the_store(tmp_path: Path) -> None:
    own = tmp_path / "kvfs.toml"
    own.write_text(f'store = ["{tmp_path}", "/disk2"]\n')
    assert len(configure(None, [tmp_path], None, None).directories) == 2
    own.write_text('store = ["/elsewhere"]\n')
    with pytest.raises(InvalidInput, match="as its first store"):
        configure(None, [tmp_path], None, None)


@pytest.mark.parametrize("text", ["max_byte = 1", "store = [", 'mount = "x"', "\xff"])
def test_a_bad_file_of_a_store_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "kvfs.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidInput, match=r"kvfs\.toml"):
        configure(None, [tmp_path], None, None)
