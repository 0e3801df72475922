"""A vLLM engine in one process, told by its test what to do: one JSON command a line on standard
input, one JSON reply a line on the descriptor that its first argument names.

Its second argument is JSON: what `LLM` takes. Logs go to standard output and error.
"""

import json
import os
import sys
import time
from typing import Any

SETTLE_DEADLINE_S = 60.0

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}


def generate(llm: Any, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    """Greedy answers to several prompts at once."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
    )
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
            "reason": output.outputs[0].finish_reason,
            "first_token_s": output.metrics.first_token_latency,
            "preemptions": output.metrics.num_preemptions
            if hasattr(output.metrics, "num_preemptions")
            else None,
        }
        for output in outputs
    ]


def metrics(llm: Any) -> dict[str, float]:
    """What the engine would show at /metrics of kvfs, and its preemptions; reasons in braces."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(("vllm:kvfs_", "vllm:num_preemptions")) and hasattr(
            metric, "value"
        ):
            reason = metric.labels.get("reason")
            name = f"{metric.name}{{{reason}}}" if reason else metric.name
            found[name] = found.get(name, 0) + metric.value
    return found


def settle(llm: Any) -> bool:
    """Step the engine until it has nothing left to do, saves included."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    end_s = time.monotonic() + SETTLE_DEADLINE_S
    while scheduler.has_requests():
        if time.monotonic() > end_s:
            return False
        llm.llm_engine.step()
        time.sleep(0.001)
    return True


def forget(llm: Any, **what: bool) -> bool:
    """Empty the engine's own prefix cache, which asks for all blocks to be given back."""
    return settle(llm) and llm.reset_prefix_cache(**what)


def main() -> None:
    from vllm import LLM

    replies = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    llm = LLM(**json.loads(sys.argv[2]), disable_log_stats=False)
    actions = {
        "generate": lambda prompts, tokens: generate(llm, prompts, tokens),
        "metrics": lambda: metrics(llm),
        "settle": lambda: settle(llm),
        "forget": lambda: forget(llm),
        "forget_all": lambda: forget(llm, reset_connector=True),
        "stop": llm.llm_engine.engine_core.shutdown,
    }
    replies.write(json.dumps("ready") + "\n")
    for line in sys.stdin:
        name, arguments = json.loads(line)
        replies.write(json.dumps(actions[name](**arguments)) + "\n")
        if name == "stop":
            break


if __name__ == "__main__":
    main()
