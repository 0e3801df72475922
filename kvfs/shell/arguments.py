"""The words of the `kvfs` command: its sub-commands, their options and their help."""

import argparse
import sys
from pathlib import Path
from typing import NoReturn, TypeAlias

from kvfs import __version__
from kvfs.config import REPLAY_BLOCK_BYTES

Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"  # argparse has no public name for it

USAGE_ERROR = 2
PREFIX_LINES = 200  # of `kvfs prefixes` unless --limit says otherwise


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {message}; see {self.prog} --help\n")
        sys.exit(USAGE_ERROR)


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


_count.__name__ = "count"  # argparse names it in its message


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


_seconds.__name__ = "number of seconds"


def _factor(text: str) -> float:
    return _seconds(text)


_factor.__name__ = "number above 0"


def _path(text: str) -> Path:
    """A path for a file or directory. Python takes an empty one for the working directory; a person
    who wrote `--store "$STORE"` did not mean that."""
    return Path(_some(text))


def _some(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("is empty; name one")
    return text


_EPILOG = """\
examples:
  kvfs mount /mnt/kv --store /nvme/kvfs     serve a store and show it at /mnt/kv
  kvfs status                               of the only mount, or of --store DIR
  kvfs prefixes --tokenizer ./model         which prompts are cached, with their text
  kvfs explain --model Qwen/Qwen3-8B --text "You are" --tokenizer ./model
  kvfs verify kv                            check every chunk file against its digest

Which store: --store DIR; else the mount that a PATH lies in; else the mount that you are in; else
the only mount; else the default store. A PATH outside of a mount counts from the store's root.
Exit code: 0 done, 1 found a problem, 2 could not run.
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all words. It ends the process with exit code 2 for those that fit nothing."""
    parser = _Parser(
        prog="kvfs",
        description="The file system for KV caches: mount it, serve from it, look inside.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvfs {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_running(commands)
    _add_config(commands)
    _add_looking(commands)
    _add_changing(commands)
    _add_replay(commands)
    return parser


def _add(commands: Commands, name: str, text: str, epilog: str = "") -> _Parser:
    return commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=epilog or None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_store(parser: _Parser) -> _Parser:
    parser.add_argument("--store", type=_path, metavar="DIR", help="the store's (first) directory")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _add_node(parser: _Parser) -> None:
    parser.add_argument(
        "--store",
        dest="stores",
        type=_path,
        action="append",
        default=[],
        metavar="DIR",
        help="a directory of the store, made when it is missing; repeat for more disks",
    )
    parser.add_argument(
        "--config", type=_path, metavar="FILE", help="a TOML file; default: kvfs.toml in the store"
    )
    parser.add_argument(
        "--max-bytes",
        type=_some,
        metavar="SIZE",
        help="limit of each directory: 200GiB, or 80%% of its disk",
    )
    parser.add_argument(
        "--join",
        type=_some,
        metavar="URL",
        help="be one of many nodes: redis://host:6379 holds the names of all",
    )


def _add_running(commands: Commands) -> None:
    parser = _add(
        commands,
        "mount",
        "serve a store and show it as a file system",
        "Returns when the mount serves, and leaves it running. Its log is node.log in the store.",
    )
    parser.add_argument("mountpoint", type=_path, metavar="MOUNTPOINT")
    _add_node(parser)
    parser.add_argument("--foreground", action="store_true", help="stay until stopped")
    parser.add_argument(
        "-o",
        dest="options",
        action="append",
        default=[],
        metavar="OPTIONS",
        help="as in fstab: allow_other, ro, noexec, store=DIR, max_bytes=SIZE ...",
    )
    _add_tokenizer(parser, "to show prompts as text in .kvfs/prefixes")

    parser = _add(commands, "umount", "take a mount down")
    parser.add_argument("mountpoint", type=_path, metavar="MOUNTPOINT")
    parser.add_argument("--lazy", action="store_true", help="also while files in it are open")

    parser = _add(
        commands,
        "serve",
        "serve a store without a mount",
        "Runs until SIGTERM, SIGINT or SIGHUP. Commands and engines start one when they need it.",
    )
    _add_node(parser)
    parser.add_argument(
        "--idle-exit",
        type=_seconds,
        metavar="SECONDS",
        help="leave so long after the last client; log to node.log only",
    )

    parser = _add_store(
        _add(
            commands,
            "leave",
            "move what only this node of a cluster has to other nodes",
            "Returns when the node may be stopped without loss. Exit code 1 when other nodes have\n"
            "no room for all: what is left is printed. A node that starts again is a full member.",
        )
    )
    parser.add_argument(
        "place", nargs="?", type=_some, metavar="STORE|MOUNTPOINT", help="default: the only mount"
    )

    parser = _add(commands, "init", "make an empty store with a configuration to edit")
    parser.add_argument("directory", type=_path, nargs="?", metavar="DIR")

    parser = _add(
        commands,
        "doctor",
        "check this machine and a store, and say what to do",
        "Exit code 1 when something does not work.",
    )
    _add_store(parser)


def _add_config(commands: Commands) -> None:
    parser = _add(commands, "config", "print what makes vLLM or LMCache use a store")
    engines = parser.add_subparsers(dest="engine", metavar="vllm|lmcache", required=True)
    for name, text in (
        ("vllm", "print the command of a vLLM server that keeps its KV cache in a store"),
        ("lmcache", "print the commands of an LMCache server on a mount, and of vLLM with it"),
    ):
        parser = _add(engines, name, text)
        parser.add_argument("--store", type=_path, metavar="DIR", help="the store's directory")
        parser.add_argument("--model", type=_some, metavar="M", help="the model to serve")
    parser.add_argument("--mountpoint", type=_path, metavar="DIR", help="default: the only mount")
    parser.add_argument("--port", type=_count, metavar="N", help="of the LMCache server")
    parser.add_argument(
        "--adapter", choices=("fs", "fs_native"), default="fs_native", help="fs_native: the faster"
    )


def _add_tokenizer(parser: _Parser, purpose: str) -> None:
    parser.add_argument(
        "--tokenizer",
        type=_path,
        metavar="DIR",
        help=f"holds the model's tokenizer.json, {purpose}",
    )


def _add_path(parser: _Parser, nargs: str, text: str) -> None:
    parser.add_argument("paths", nargs=nargs, type=_some, metavar="PATH", help=text)


def _add_looking(commands: Commands) -> None:
    add = _add_store
    add(_add(commands, "status", "show the node, its room and its counters"))

    parser = add(_add(commands, "top", "show what the node does now, until it is interrupted"))
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="seconds between two looks (1)"
    )
    parser.add_argument("--count", type=_count, metavar="N", help="how many times (0: no end)")

    parser = add(_add(commands, "ls", "list a directory of the store"))
    parser.add_argument(
        "-l", "--long", action="store_true", help="mode, owner, size, time; p: pinned"
    )
    parser.add_argument("paths", nargs="?", type=_one_path, default=["."], metavar="PATH")

    parser = add(_add(commands, "show", "show everything about one file"))
    parser.add_argument("paths", type=_one_path, metavar="PATH|DIGEST")

    parser = add(
        _add(
            commands,
            "du",
            "sum up directories",
            "size: as ls shows it. unique: equal contents once. on disk: what those take there.",
        )
    )
    parser.add_argument("--depth", type=_count, default=2, metavar="N", help="levels shown (2)")
    parser.add_argument("paths", nargs="?", type=_one_path, default=["."], metavar="PATH")

    parser = add(
        _add(
            commands,
            "prefixes",
            "show which starts of prompts are cached, as a tree",
            "One line is a run of chunks without a branch: tokens, chunks, size, last use, text.",
        )
    )
    parser.add_argument("model", nargs="?", type=_some, metavar="MODEL", help="only of this model")
    parser.add_argument("--depth", type=_count, metavar="N", help="levels of branches shown")
    parser.add_argument(
        "--limit",
        type=_count,
        default=PREFIX_LINES,
        metavar="N",
        help=f"lines of each model ({PREFIX_LINES}; 0: all)",
    )
    parser.add_argument("--all", action="store_true", help="also models of which no chunk is left")
    _add_tokenizer(parser, "to show the text")

    parser = add(
        _add(
            commands,
            "explain",
            "say how far a prompt hits, chunk by chunk, and why no further",
            'example: kvfs explain --model Qwen/Qwen3-8B --text "You are" --tokenizer ./model',
        )
    )
    parser.add_argument(
        "--model", required=True, type=_some, metavar="M", help="a model, or its start"
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--text", metavar="T", help="the prompt (with --tokenizer)")
    prompt.add_argument(
        "--tokens",
        type=_some,
        metavar="FILE",
        help="its token ids, as JSON or numbers; - reads them",
    )
    _add_tokenizer(parser, "for --text")


def _one_path(text: str) -> list[str]:
    return [_some(text)]


def _add_changing(commands: Commands) -> None:
    add = _add_store
    for name, text in (
        ("pin", "protect files from eviction"),
        ("unpin", "let files be evicted again"),
        ("evict", "remove files that are not pinned"),
    ):
        parser = add(_add(commands, name, text))
        _add_path(parser, "+", "a file, or a directory for all that it holds")

    parser = add(
        _add(
            commands,
            "warm",
            "bring files here that only tiers or other nodes have",
            "Behind whatever engines read. Exit code 1 when nobody gives some of them.",
        )
    )
    _add_path(parser, "+", "a file, or a directory for all that it holds")

    parser = add(
        _add(
            commands,
            "verify",
            "check files against their digests; quarantine what is bad",
            "Exit code 1 when a file was bad. Its names are gone then: engines store it again.",
        )
    )
    parser.add_argument("paths", nargs="?", type=_one_path, default=["/"], metavar="PATH")
    add(_add(commands, "gc", "remove what dead processes left"))
    add(
        _add(
            commands,
            "rebuild",
            "give chunk files whose metadata was lost their names again",
        )
    )


def _add_replay(commands: Commands) -> None:
    parser = _add(
        commands,
        "replay",
        "replay a trace of requests against a set of tiers",
        "TRACE is in Mooncake's format: a JSON object a line with timestamp (ms), input_length,\n"
        "output_length and hash_ids. Each request puts its blocks into all tiers; the next that\n"
        "begins with them reads them. Exit code 1 when blocks could not be read.",
    )
    parser.add_argument("trace", type=_path, metavar="TRACE")
    parser.add_argument(
        "--simulate",
        action="append",
        default=[],
        type=_some,
        metavar="NAME:GB_PER_S[:LATENCY_MS]",
        help="a tier on a virtual clock; repeat for more. Else the [[tiers]] of --config are read",
    )
    parser.add_argument(
        "--config", type=_path, metavar="FILE", help="default: kvfs.toml in the default store"
    )
    parser.add_argument(
        "--capacity",
        action="append",
        default=[],
        type=_some,
        metavar="NAME:SIZE",
        help="what a tier keeps, least recently used out first; default: everything",
    )
    parser.add_argument(
        "--block-bytes",
        type=_some,
        default=REPLAY_BLOCK_BYTES,
        metavar="SIZE",
        help="of one entry of hash_ids, 512 tokens; default: 64MiB",
    )
    parser.add_argument(
        "--speed", type=_factor, default=1.0, metavar="X", help="requests come X times as fast"
    )
    parser.add_argument("--limit", type=_count, metavar="N", help="the first N requests only")
    parser.add_argument(
        "--prepare", action="store_true", help="put blocks that are missing into the tiers first"
    )
    parser.add_argument(
        "--remove", action="store_true", help="take the blocks out of the tiers at the end"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
