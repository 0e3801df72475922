"""What `kvfs config` prints can be given to a shell as it is."""

import json
import shlex
from pathlib import Path

import pytest

from kvfs.shell.configs import (
    lmcache_config,
    lmcache_server_command,
    lmcache_vllm_command,
    vllm_command,
    vllm_config,
)

AWKWARD = Path('/mnt/it\'s a "kv" $store')


def as_a_shell_reads(text: str) -> list[list[str]]:
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


@pytest.mark.parametrize("store", [Path("/var/lib/kvfs"), AWKWARD])
def test_the_vllm_text_is_the_command(store: Path) -> None:
    (words,) = as_a_shell_reads(vllm_config(store, "some/model"))
    assert words == vllm_command(store, "some/model")
    transfer = json.loads(option(words, "--kv-transfer-config"))
    assert transfer["kv_connector_extra_config"]["kvfs.store"] == str(store)
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert option(words, "--model") == "some/model"


@pytest.mark.parametrize("mountpoint", [Path("/mnt/kv"), AWKWARD])
def test_the_lmcache_text_is_the_two_commands(mountpoint: Path) -> None:
    text = lmcache_config(mountpoint, "some/model", port=6001, adapter="fs")
    server, engine = as_a_shell_reads(text)
    assert server == lmcache_server_command(mountpoint, port=6001, adapter="fs")
    assert engine == lmcache_vllm_command("some/model", 6001)
    storage = json.loads(option(server, "--l2-adapter"))
    assert storage == {"type": "fs", "base_path": f"{mountpoint}/lmcache"}
    transfer = json.loads(option(engine, "--kv-transfer-config"))
    assert transfer["kv_connector_extra_config"]["lmcache.mp.port"] == 6001
    assert option(server, "--port") == "6001"


def test_a_placeholder_is_pointed_out() -> None:
    assert "place of MODEL" in vllm_config(Path("/s"))
    assert "place of" not in vllm_config(Path("/s"), "m")
