"""A vLLM that keeps its KV cache in kvfs, for scripts/demo.py; runs in .envs/vllm.

    demo_engine.py MODEL TRANSFER_CONFIG

Reads prompts from standard input, one JSON list of token ids a line, and writes for each one JSON
object: the seconds to its first token, how many of its tokens were not computed, and the answer's
tokens. What vLLM says goes to standard error. Leaves when its input ends.
"""

import json
import os
import sys
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}


def start_engine(model: str, transfer: dict[str, Any]) -> Any:
    """One engine in this process, small enough for a laptop."""
    from vllm import LLM

    return LLM(
        model=model,
        # The type that every CPU computes at full speed. bfloat16 is emulated on those without
        # instructions for it, which would make computing look slower than it has to be.
        dtype="float32",
        max_model_len=4096,
        enforce_eager=True,
        distributed_executor_backend="uni",
        disable_log_stats=False,
        kv_transfer_config=transfer,
    )


def answer(engine: Any, prompt: list[int]) -> dict[str, Any]:
    """Answer one prompt greedily."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return {
        "first_token_s": output.metrics.first_token_latency,
        "cached_tokens": output.num_cached_tokens,
        "tokens": list(output.outputs[0].token_ids),
    }


def main() -> int:
    """Answer until the input ends."""
    model, transfer = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints to standard output, too
    engine = start_engine(model, json.loads(transfer))
    replies.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        replies.write(json.dumps(answer(engine, json.loads(line))) + "\n")
    # Waits for what is still being stored.
    engine.llm_engine.engine_core.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
