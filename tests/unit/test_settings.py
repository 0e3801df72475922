"""What a person writes in a configuration: a mistake is one line with file, key and cure."""

import os
from pathlib import Path

import pytest

from kvfs.blobs import BlobDirectory
from kvfs.config import CLUSTER_NODES_MAX, COPY_RULES_MAX
from kvfs.errors import InvalidInput
from kvfs.peers.address import bulk_port, parse_address
from kvfs.settings.load import load_config, load_config_of_store, parse_config
from kvfs.settings.rules import parse_copy_rules
from kvfs.settings.sizes import Share, parse_limit, show_limit
from kvfs.settings.words import CopyRule, DirectoryConfig, PrefetchConfig


@pytest.mark.parametrize(
    ("text", "subject", "cure"),
    [
        ("max_bytes = 2000000000000000000", "max_bytes", "write for example"),
        (f'max_bytes = "{"9" * 400}"', "max_bytes", "write for example"),
        ('min_free = "2000000PiB"', "min_free", "write for example"),
        ("max_bytes = -1", "max_bytes", "write for example"),
        ("max_bytes = true", "max_bytes", "write for example"),
        ('max_bytes = "101%"', "max_bytes", "between 0% and 100%"),
        ("socket_mode = 600", "socket_mode", "write 0o600"),
        ("socket_mode = 0o7777", "socket_mode", "write 0o600"),
        ("socket_mode = 0o060", "socket_mode", "write 0o600"),
        ("socket_mode = -1", "socket_mode", "write 0o600"),
        ("socket_mode = true", "socket_mode", "write 0o600"),
        ("idle_exit_s = -1", "idle_exit_s", "above 0"),
        ("idle_exit_s = nan", "idle_exit_s", "above 0"),
        ("idle_exit_s = inf", "idle_exit_s", "above 0"),
        ("fsync = 1", "fsync", "neither true nor false"),
        ('[cluster]\nname = "x"', r"cluster\.metadata", "write where the names are"),
        ('[cluster]\nmetadata = "http://x"', r"cluster\.metadata", "is no such URL"),
        ('[cluster]\nmetadata_file = "/nowhere"', r"cluster\.metadata_file", "No such file"),
        ("[cluster]\nmetadata_file = 5", r"cluster\.metadata_file", "is no text"),
        (
            '[cluster]\nmetadata_file = "/nowhere"\nmetadata = "redis://x"',
            r"cluster\.metadata_file",
            "write one",
        ),
        ("[mount]\nread_ahead_kib = -1", r"mount\.read_ahead_kib", "from 0 to"),
        ("[mount]\nread_ahead_kib = 1e3", r"mount\.read_ahead_kib", "from 0 to"),
        ("[mount]\nread_ahead_kib = 2000000000", r"mount\.read_ahead_kib", "from 0 to"),
        ('[mount]\nallow_other = "yes"', r"mount\.allow_other", "neither true nor false"),
        ("[mount]\npassthrough = 0", r"mount\.passthrough", "neither true nor false"),
        ("[mount]\nmax_bytes = 5", r"mount\.max_bytes", r"belongs above the first \[table\]"),
        ("read_ahead_kib = 5", "read_ahead_kib", r"belongs below \[mount\]"),
        ('socket_mode = "0o660"', "socket_mode", "without quotes"),
        ("max_bytes = 0", "max_bytes", "leave it out"),
        ('max_bytes = "0%"', "max_bytes", "leave it out"),
        ("mount = 1", "mount", r"write \[mount\]"),
        ("prefetch = 1", "prefetch", r"write \[prefetch\]"),
        ("[prefetch]\nexpected = 1", r"prefetch\.expected", "neither true nor false"),
        ('[prefetch]\nfull_at = "9GiB"', r"prefetch\.full_at", "is no share"),
        ("[prefetch]\nfull_at = 0.9", r"prefetch\.full_at", 'write for example "90%"'),
        ("[prefetch]\nwarm = true", r"prefetch\.warm", "known are children"),
        ("children = true", "children", r"belongs below \[prefetch\]"),
        ("nonsense = 1", "nonsense", "known are"),
        ('store = ["/a", "/a"]', "store", "name it once"),
        (f"fsync = {'1' * 5000}", "", "is no TOML"),
    ],
)
def test_a_mistake_names_file_key_and_cure(
    tmp_path: Path, text: str, subject: str, cure: str
) -> None:
    file = tmp_path / "written.toml"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=rf"written\.toml: {subject}.*{cure}") as caught:
        load_config(file)
    assert "\n" not in str(caught.value)


def test_prefetch_is_on_and_its_kinds_are_switched_one_by_one() -> None:
    store = {"store": ["/a"]}
    assert parse_config(store).prefetch == PrefetchConfig(True, True, True, 0.9)
    table = store | {"prefetch": {"successors": False, "full_at": "50%"}}
    assert parse_config(table).prefetch == PrefetchConfig(successors=False, full_at=0.5)


def test_a_mistake_in_the_words_of_the_command_does_not_blame_the_file(tmp_path: Path) -> None:
    (tmp_path / "kvfs.toml").touch()
    with pytest.raises(InvalidInput, match=r"^--max-bytes: "):
        load_config_of_store([tmp_path], max_bytes="much")
    with pytest.raises(InvalidInput, match=r"^--store: .*twice"):
        load_config_of_store([tmp_path, tmp_path])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"none\.toml: is not there"):
        load_config(tmp_path / "none.toml")


def test_named_directories_come_first_with_the_limits_of_the_first_stores_file(
    tmp_path: Path,
) -> None:
    first, second, third = (tmp_path / name for name in ("a", "b", "c"))
    first.mkdir()
    (first / "kvfs.toml").write_text(
        f'fsync = true\nmin_free = "1%"\n[[store]]\npath = "{first}"\nmax_bytes = "1GiB"\n'
        f'[[store]]\npath = "{third}"\nmax_bytes = "3GiB"\n'
    )
    second.mkdir()
    (second / "kvfs.toml").write_text('max_bytes = "2GiB"\n')
    config = load_config_of_store([first, second])
    assert config.fsync
    assert config.directories == (
        DirectoryConfig(first, 2**30, Share(0.01)),
        DirectoryConfig(second, None, Share(0.01)),
        DirectoryConfig(third, 3 * 2**30, Share(0.01)),
    )
    config = load_config_of_store([first, third, second], max_bytes="5GiB")
    assert [d.path for d in config.directories] == [first, third, second]
    assert {d.max_bytes for d in config.directories} == {5 * 2**30}


@pytest.mark.parametrize("limit", [None, 0, 2**40, Share(0.0), Share(0.125), Share(1.0)])
def test_limits_are_read_as_they_were_written(limit: int | Share | None) -> None:
    assert parse_limit(show_limit(limit), "limit") == limit


def test_a_store_that_is_a_file_is_called_one(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for take in (
        lambda: load_config_of_store([file]),
        lambda: BlobDirectory.open(DirectoryConfig(file)),
    ):
        with pytest.raises(InvalidInput, match="is no directory; name one"):
            take()


@pytest.mark.parametrize(
    "text", ["[1,2]", "", "{", "{}", '{"version": 1}', '{"version": 1, "id": "../x"}', "[" * 9999]
)
def test_a_damaged_mark_is_described_in_words_of_the_store(tmp_path: Path, text: str) -> None:
    (tmp_path / "store.json").write_text(text)
    with pytest.raises(InvalidInput, match=r"store\.json: is damaged: it must hold .* restore it"):
        BlobDirectory.open(DirectoryConfig(tmp_path))


def test_copies_of_a_cluster_are_read_with_it(tmp_path: Path) -> None:
    (tmp_path / "kvfs.toml").write_text(
        '[cluster]\nmetadata = "redis://host"\n'
        '[[cluster.copies]]\nprefix = "kv/a@"\ncopies = 2\n'
        '[[cluster.copies]]\nprefix = ""\ncopies = 1\n'
    )
    config = load_config_of_store([tmp_path])
    assert config.cluster is not None
    assert config.cluster.copies == (CopyRule(b"kv/a@", 2), CopyRule(b"", 1))
    (tmp_path / "kvfs.toml").write_text(
        '[cluster]\nmetadata = "redis://host"\n[[cluster.copies]]\nprefix = "a"\ncopies = -1\n'
    )
    with pytest.raises(InvalidInput, match=r"kvfs\.toml: cluster\.copies\.copies: -1 is no number"):
        load_config_of_store([tmp_path])
    with pytest.raises(InvalidInput, match=r"^copies: unknown key; .* belongs below \[cluster\]"):
        parse_config({"copies": []})


def test_bytes_are_not_encrypted_without_keys(tmp_path: Path) -> None:
    file = tmp_path / "kvfs.toml"
    text = '[cluster]\nmetadata = "redis://10.0.0.1:6379"\nencrypt_bulk = true\n'
    file.write_text(text)
    found = load_config(file).cluster
    assert found is not None and found.encrypt_bulk
    file.write_text(text + "insecure = true\n")
    with pytest.raises(InvalidInput, match=r"cluster.encrypt_bulk.*needs keys"):
        load_config(file)


def test_a_url_may_lie_in_a_file_of_its_own(tmp_path: Path) -> None:
    written = tmp_path / "metadata"
    written.write_text("redis://me:hush@here\n")
    table = {"cluster": {"metadata_file": str(written), "name": "x"}}
    cluster = parse_config(table, [tmp_path / "store"]).cluster
    assert cluster is not None
    assert (cluster.metadata, cluster.name) == ("redis://me:hush@here", "x")
    written.write_text("http://me:hush@here\n")
    with pytest.raises(InvalidInput, match=r"cluster\.metadata_file") as caught:
        parse_config(table, [tmp_path / "store"])
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("value", ["-1", "1.5", "true", '"2"'])
def test_what_is_no_count_is_refused(tmp_path: Path, value: str) -> None:
    file = tmp_path / "kvfs.toml"
    file.write_text(f'[cluster]\nmetadata = "redis://10.0.0.1:6379"\ncopy_after = {value}\n')
    with pytest.raises(InvalidInput, match=r"cluster.copy_after.*is no number from 0"):
        load_config(file)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ('listen = "10.0.0.7:7400"\nbulk_port = 7400', "is the port of listen"),
        ('listen = "10.0.0.7:65535"', "write bulk_port"),
        ("bulk_port = 65536", "is no port from 0"),
        ("bulk_port = true", "is no port from 0"),
        ('bulk_port = "7401"', "is no port from 0"),
    ],
)
def test_a_port_for_bytes_that_cannot_be_is_refused(
    tmp_path: Path, lines: str, reason: str
) -> None:
    file = tmp_path / "kvfs.toml"
    file.write_text(f'[cluster]\nmetadata = "redis://10.0.0.1:6379"\n{lines}\n')
    with pytest.raises(InvalidInput, match=reason):
        load_config(file)


@pytest.mark.parametrize(
    ("listen", "written", "port"),
    [("h:7400", None, 7401), ("h:7400", 9000, 9000), ("h:7400", 0, 0), ("h:0", None, 0),
     ("h:0", 9000, 9000)],
)  # fmt: skip
def test_bytes_go_by_the_port_behind_that_of_messages(
    listen: str, written: int | None, port: int
) -> None:
    assert bulk_port(parse_address(listen), written) == port


def test_a_fifo_that_nobody_writes_into_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.settings.file.CONFIG_WAIT_S", 0.05)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "kvfs.toml").write_text(f'[cluster]\nmetadata_file = "{fifo}"\n')
    for file in (fifo, tmp_path / "kvfs.toml"):
        with pytest.raises(InvalidInput, match="it is a FIFO, and nobody wrote all into it"):
            load_config(file)
    writer = os.open(fifo, os.O_RDWR)
    os.write(writer, b"fsync = true")
    with pytest.raises(InvalidInput, match="nobody wrote all"):  # it may write more
        load_config(fifo)
    os.close(writer)
    with pytest.raises(InvalidInput, match="is a character device and no file"):
        load_config(Path("/dev/zero"))


@pytest.mark.parametrize("value", ["node7:7400", "10.0.0.7", "10.0.0.7:70000"])
def test_where_others_cannot_reach_a_node_is_refused(tmp_path: Path, value: str) -> None:
    file = tmp_path / "kvfs.toml"
    file.write_text(f'[cluster]\nmetadata = "redis://10.0.0.1:6379"\nlisten = "{value}"\n')
    with pytest.raises(InvalidInput, match=r"must have an IP address|is no address"):
        load_config(file)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"prefix": "a", "copies": 2}, r"^cluster\.copies: is no list of tables"),
        ([1], r"^cluster\.copies: is no list of tables"),
        ([{"copies": 2}], r"^cluster\.copies\.prefix: is missing or no text"),
        ([{"prefix": 7, "copies": 2}], r"^cluster\.copies\.prefix: is missing or no text"),
        ([{"prefix": "a\0", "copies": 2}], r"^cluster\.copies\.prefix: .* begins no path"),
        ([{"prefix": "a" * 5000, "copies": 2}], r"^cluster\.copies\.prefix: .* begins no path"),
        ([{"prefix": "a"}], r"^cluster\.copies\.copies: nothing is no number of nodes from 1"),
        ([{"prefix": "a", "copies": 0}], r"^cluster\.copies\.copies: 0 is no number"),
        ([{"prefix": "a", "copies": True}], r"^cluster\.copies\.copies: True is no number"),
        ([{"prefix": "a", "copies": "all"}], r"^cluster\.copies\.copies: 'all' is no number"),
        ([{"prefix": "a", "copies": CLUSTER_NODES_MAX + 1}], r"from 1 to 1000"),
        ([{"prefix": "a", "number": 2}], r"^cluster\.copies\.number: unknown key"),
        ([{"prefix": "a", "copies": 2}] * 2, r"^cluster\.copies\.prefix: 'a' is named twice"),
        ([{"prefix": "a", "copies": 2}] * (COPY_RULES_MAX + 1), r"are 257 rules; 256 are"),
    ],
)
def test_a_rule_of_copies_that_is_none_is_told_precisely(value: object, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        parse_copy_rules(value)
