"""Tokens per second of whole generations beside transformers, the same weights, in one run.

    python bench/end_to_end.py [--model smollm2-135m] [--requests 1 16] [--rounds 3]

Both sides generate greedily, exactly `--tokens` tokens per request, from prompts of mixed lengths. transformers runs them
as one left-padded static batch, its usual way. Before anything is timed the tokens of both sides are compared: a request
may part only where transformers' two best logits are closer than 1e-3. Sides alternate within each round; the table
shows the median round.
"""

# pyright: reportMissingImports=false
# It runs as a script, which is in no package: where `octavo` is, the installation knows.
from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from octavo import LLM, SamplingParams
from octavo.bench.peers.transformers import TransformersStatic, load_model

_TEXT = (
    "The history of printing begins with wooden blocks that carried a whole page. Movable type broke the page into "
    "letters, which could be set, used and set again. A compositor worked from a case of small boxes, one for each "
    "letter, and a page was a loan of letters that went back to their boxes when the sheet was printed. "
) * 8


def prompts_of(tokenizer, lengths: list[int]) -> list[list[int]]:
    ids = tokenizer.encode(_TEXT)
    return [ids[3 * i : 3 * i + length] for i, length in enumerate(lengths)]


def run_octavo(llm: LLM, prompts: list[list[int]], tokens: int):
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@torch.inference_mode()
def verify(model, prompts, ours, theirs, eos: set[int]) -> int:
    """Number of requests whose comparison a near-tie ended; raises when one parts elsewhere."""
    ties = 0
    for prompt, a, b in zip(prompts, ours, theirs, strict=True):
        part = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if part is None:
            continue
        logits = model(torch.tensor([prompt + a[:part]])).logits[0, -1]
        # min_new_tokens keeps transformers from ending, so it never draws an end token; ours goes on after it
        logits[list(eos)] = logits.min() if a[part] not in eos else logits[list(eos)]
        best = logits.topk(2).values
        if a[part] in eos or best[0] - best[1] < 1e-3:
            ties += 1
            continue
        raise AssertionError(
            f"token {part} differs: {a[part]} against {b[part]}, best logits {best.tolist()}"
        )
    return ties


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the figures to this file too")
    args = parser.parse_args()

    llm = LLM(args.model, enable_prefix_caching=False)
    reference = load_model(args.model)
    transformers = TransformersStatic(reference)
    eos = set(llm.tokenizer.eos_token_ids)
    rows = []
    for count in args.requests:
        lengths = [8 + (53 * i) % 190 for i in range(count)]
        prompts = prompts_of(llm.tokenizer, lengths)
        ours = run_octavo(llm, prompts, args.tokens)  # also the warm-up
        theirs = [outputs[0] for outputs in transformers.generate(prompts, args.tokens)]
        ties = verify(reference, prompts, ours, theirs, eos)
        seconds: dict[str, list[float]] = {"octavo": [], "transformers": []}
        for _ in range(args.rounds):
            started = time.perf_counter()
            run_octavo(llm, prompts, args.tokens)
            middle = time.perf_counter()
            transformers.generate(prompts, args.tokens)
            seconds["octavo"].append(middle - started)
            seconds["transformers"].append(time.perf_counter() - middle)
        total = count * args.tokens
        speed = {name: total / statistics.median(times) for name, times in seconds.items()}
        rows.append(
            {
                "requests": count,
                "near_ties": ties,
                **speed,
                "ratio": speed["octavo"] / speed["transformers"],
            }
        )
    print(
        f"{'requests':>8} {'octavo':>12} {'transformers':>14} {'ratio':>7}   tokens/s, {torch.get_num_threads()} threads"
    )
    for row in rows:
        print(f"{row['requests']:>8} {row['octavo']:>12.1f} {row['transformers']:>14.1f} {row['ratio']:>7.2f}"
              f"   ({row['near_ties']} comparisons ended by a near-tie)")  # fmt: skip
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
