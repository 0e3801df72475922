"""One life of a vLLM engine: start, warm up, answer prompts, say how long their first tokens took.

Run by scripts/bench_vllm.py with the interpreter of `.envs/vllm`; prints one line of JSON.

    .envs/vllm/bin/python scripts/vllm_restart.py MODEL --tokens 2049 --seeds 1 2 --warm-seed 3
        --dtype float32 [--connector JSON --watch DIRECTORY]

The engine, its scheduler and its worker are in this one process, as `vllm serve` has them for one
GPU; between steps that compute nothing it sleeps a millisecond, as vLLM's engine process does.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
ROOT = Path(__file__).parent.parent
# The engine imports scripts.vllm_cpu_tiering by name.
sys.path.insert(0, str(ROOT))

from vllm import EngineArgs, SamplingParams, TokensPrompt  # noqa: E402  (environment first)
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

from scripts.engine_rig import prompt_tokens, wait_unchanged  # noqa: E402
from scripts.memory_rig import drop_page_cache  # noqa: E402

ANSWER_TOKENS = 8
IDLE_STEP_S = 0.001
HIT_METRIC = "vllm:external_prefix_cache_hits"


def start_engine(arguments: argparse.Namespace) -> LLMEngine:
    """An engine that fits a small machine."""
    options: dict[str, Any] = {}
    if arguments.connector:
        options["kv_transfer_config"] = json.loads(arguments.connector)
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(arguments.model),
            dtype=arguments.dtype,
            max_model_len=4096,
            enforce_eager=True,
            distributed_executor_backend="uni",
            disable_log_stats=False,
            **options,
        )
    )


def answer(engine: LLMEngine, name: str, prompt: list[int]) -> dict[str, Any]:
    """Complete a prompt greedily."""
    parameters = SamplingParams(
        temperature=0,
        max_tokens=ANSWER_TOKENS,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    tokens: list[int] = []
    first_token_s = 0.0
    cached_tokens = 0
    steps = 0
    began_s = time.perf_counter()
    engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), parameters)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        for output in outputs:
            new = output.outputs[0].token_ids
            if new and not tokens:
                first_token_s = time.perf_counter() - began_s
            tokens += new
            cached_tokens = output.num_cached_tokens or cached_tokens
        if not tokens:
            steps += 1
        if not outputs:
            time.sleep(IDLE_STEP_S)
    return {
        "first_token_s": first_token_s,
        "tokens": tokens,
        "cached_tokens": cached_tokens,
        "steps": steps,
    }


def external_hits(engine: LLMEngine) -> int:
    """The engine's own count of tokens that came from outside of its memory."""
    return sum(metric.value for metric in engine.get_metrics() if metric.name == HIT_METRIC)


def main() -> int:
    """Run one life and print what it measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, required=True, help="length of the prompts")
    parser.add_argument("--seeds", type=int, nargs="+", required=True, help="make the prompts")
    parser.add_argument("--warm-seed", type=int, required=True, help="makes the warm-up prompt")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--connector", help="vLLM's kv_transfer_config, as JSON")
    parser.add_argument("--watch", type=Path, help="directory that the connector stores in")
    arguments = parser.parse_args()
    engine = start_engine(arguments)
    # The first prompt of a shape is slow whatever the cache does.
    answer(engine, "warm", prompt_tokens(arguments.tokens, seed=arguments.warm_seed))
    answers = []
    for seed in arguments.seeds:
        if arguments.watch:
            wait_unchanged(arguments.watch, meanwhile=engine.step)
        is_dropped = drop_page_cache()
        before = external_hits(engine)
        said = answer(engine, f"measured-{seed}", prompt_tokens(arguments.tokens, seed=seed))
        said["external_hits"] = external_hits(engine) - before
        answers.append({**said, "is_page_cache_dropped": is_dropped})
    if arguments.watch:
        wait_unchanged(arguments.watch, meanwhile=engine.step)
    print(json.dumps(answers))
    engine.engine_core.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
