"""Tokens per second of whole generations beside transformers, the same weights, in one run.

    python bench/end_to_end.py [--model smollm2-135m] [--scenario mixed ...] [--requests 1 4 16 64] [--rounds 3] [--markdown]

    mixed     prompts of 8 to 197 tokens, all outputs equally long
    uneven    the same prompts, outputs of an eighth to the whole of --tokens; a static batch runs until the longest is done, and
              what it makes beyond a request's length does not count
    shared    all prompts begin with the same 256 tokens, new ones in each round, so that nothing is cached when a round begins
    samples   four prompts, eight samples of each at temperature 0.8
    beams     four prompts, four beams each

Contenders: Octavo with its prefix cache, without it (where prompts share something), transformers' static batch (left-padded) and its
continuous batching (greedy only). They have the same prompts, and take turns within each round; tokens per second are of the median
round. Before a scenario is timed its results are compared: greedy tokens may part only where transformers' two best logits are
closer than 1e-3, beams are equal, and the log probabilities of samples are transformers'.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from octavo import LLM, SamplingParams
from octavo.bench.attention_problem import WrongResult
from octavo.bench.peers.transformers import TransformersContinuous, TransformersStatic, load_model

_TEXT = (
    "The history of printing begins with wooden blocks that carried a whole page. Movable type broke the page into "
    "letters, which could be set, used and set again. A compositor worked from a case of small boxes, one for each "
    "letter, and a page was a loan of letters that went back to their boxes when the sheet was printed. "
) * 16
_SHARED, _SAMPLES, _BEAMS = 256, 8, 4
Prompts = list[list[int]]
Outputs = list[list[list[int]]]  # by request, then by sample or beam


@dataclass(frozen=True)
class Scenario:
    """`prompts` makes those of a round; each contender gets them, and gives token ids."""

    name: str
    num_requests: int
    num_tokens: int  # that count, of all requests
    prompts: Callable[[int], Prompts]
    contenders: dict[str, Callable[[Prompts], Outputs]]
    verify: Callable[[Prompts, dict[str, Outputs]], str]  # a remark; raises WrongResult


class Bench:
    """The engines and models that all scenarios share."""

    def __init__(self, model: str, tokens: int) -> None:
        self.tokens = tokens
        self.cached = LLM(model, num_gpu_blocks=4096)
        self.plain = LLM(model, num_gpu_blocks=4096, enable_prefix_caching=False)
        self.reference = load_model(model)
        self.static = TransformersStatic(self.reference)
        self.continuous = TransformersContinuous(self.reference)
        self.text = self.plain.tokenizer.encode(_TEXT)
        self.eos = set(self.plain.tokenizer.eos_token_ids)

    def octavo(self, llm: LLM, **options) -> Callable[[Prompts], Outputs]:
        """Greedy, or as `options` say, each request as long as asked for."""
        lengths = options.pop("lengths", None)

        def run(prompts: Prompts) -> Outputs:
            params = [
                SamplingParams(
                    **{"temperature": 0.0, **options},
                    max_tokens=self.tokens if lengths is None else lengths[i],
                    ignore_eos=True,
                )
                for i in range(len(prompts))
            ]
            return [[list(c.token_ids) for c in out.outputs] for out in llm.generate(prompts, params)]  # fmt: skip

        return run

    def mixed(self, count: int) -> Scenario:
        contenders = {
            "octavo": self.octavo(self.plain),
            "transformers": lambda prompts: self.static.generate(prompts, self.tokens),
            "transformers continuous": lambda prompts: self.continuous.generate(
                prompts, self.tokens
            ),
        }
        total = count * self.tokens
        return Scenario("mixed", count, total, lambda _: self.prompts(count), contenders, self.same_tokens)  # fmt: skip

    def uneven(self, count: int) -> Scenario:
        lengths = [max(1, self.tokens * (1 + 5 * i % 8) // 8) for i in range(count)]

        def cut(outputs: Outputs) -> Outputs:
            return [[out[0][:length]] for out, length in zip(outputs, lengths, strict=True)]

        contenders = {
            "octavo": self.octavo(self.plain, lengths=lengths),
            "transformers": lambda prompts: cut(self.static.generate(prompts, max(lengths))),
        }
        return Scenario("uneven", count, sum(lengths), lambda _: self.prompts(count), contenders, self.same_tokens)  # fmt: skip

    def shared(self, count: int) -> Scenario:
        contenders = {
            "octavo": self.octavo(self.cached),
            "octavo, no prefix cache": self.octavo(self.plain),
            "transformers": lambda prompts: self.static.generate(prompts, self.tokens),
            "transformers continuous": lambda prompts: self.continuous.generate(
                prompts, self.tokens
            ),
        }

        def prompts(round_number: int) -> Prompts:
            # nothing of another round's: its first token is its own
            prefix = [1000 + round_number, *self.text[round_number : round_number + _SHARED - 1]]
            tails = [self.text[7 * i : 7 * i + 8 + (13 * i) % 32] for i in range(count)]
            return [prefix + tail for tail in tails]

        return Scenario("shared", count, count * self.tokens, prompts, contenders, self.same_tokens)

    def samples(self, _: int) -> Scenario:
        contenders = {
            "octavo": self.octavo(self.plain, temperature=0.8, n=_SAMPLES, seed=1),
            "transformers": lambda prompts: self.static.generate(
                prompts, self.tokens, n=_SAMPLES, temperature=0.8
            ),
        }
        total = 4 * _SAMPLES * self.tokens
        return Scenario(f"{_SAMPLES} samples", 4, total, lambda _: self.prompts(4), contenders, self.same_logprobs)  # fmt: skip

    def beams(self, _: int) -> Scenario:
        contenders = {
            "octavo": self.octavo(self.plain, use_beam_search=True, n=_BEAMS),
            "transformers": lambda prompts: self.static.generate(
                prompts, self.tokens, n=_BEAMS, num_beams=_BEAMS
            ),
        }
        total = 4 * _BEAMS * self.tokens
        return Scenario(f"{_BEAMS} beams", 4, total, lambda _: self.prompts(4), contenders, self.same_beams)  # fmt: skip

    def prompts(self, count: int) -> Prompts:
        lengths = [8 + (53 * i) % 190 for i in range(count)]
        return [self.text[3 * i : 3 * i + length] for i, length in enumerate(lengths)]

    @torch.inference_mode()
    def same_tokens(self, prompts: Prompts, outputs: dict[str, Outputs]) -> str:
        """Every contender's tokens are the static batch's, up to a near-tie."""
        ties = 0
        for name, results in outputs.items():
            for prompt, got, expected in zip(prompts, results, outputs["transformers"], strict=True):  # fmt: skip
                ties += self._parts_at_a_tie(name, prompt, got[0], expected[0])
        return f"{ties} comparisons ended by a near-tie"

    def _parts_at_a_tie(self, name: str, prompt: list[int], a: list[int], b: list[int]) -> bool:
        if len(a) != len(b):
            raise WrongResult(f"{name}: expected {len(b)} tokens, got {len(a)}")
        part = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if part is None:
            return False
        logits = self.reference(torch.tensor([prompt + a[:part]])).logits[0, -1]
        if (
            a[part] in self.eos
        ):  # min_new_tokens keeps the static batch from drawing an end token; others go on after it
            best_of_all = bool(logits[a[part]] > logits.max() - 1e-3)
        else:
            logits[list(self.eos)] = logits.min()
            best = logits.topk(2).values
            best_of_all = bool(best[0] - best[1] < 1e-3)
        if not best_of_all:
            raise WrongResult(f"{name}: token {part} is {a[part]}, transformers' {b[part]}, and no near-tie")  # fmt: skip
        return True

    @torch.inference_mode()
    def same_logprobs(self, prompts: Prompts, outputs: dict[str, Outputs]) -> str:
        """The log probability that Octavo gives its samples is transformers' for the same tokens; they are not all one."""
        params = SamplingParams(temperature=0.8, n=_SAMPLES, seed=1, max_tokens=self.tokens, ignore_eos=True)  # fmt: skip
        worst = 0.0
        for prompt, output in zip(prompts, self.plain.generate(prompts, params), strict=True):
            if len({tuple(c.token_ids) for c in output.outputs}) == 1:
                raise WrongResult("all samples are the same")
            ids = torch.tensor([prompt + list(c.token_ids[:-1]) for c in output.outputs])
            drawn = torch.tensor([list(c.token_ids) for c in output.outputs])
            logprobs = self.reference(ids).logits[:, len(prompt) - 1 :].log_softmax(-1)
            exact = logprobs.gather(2, drawn[..., None]).sum((1, 2))
            got = torch.tensor([c.cumulative_logprob for c in output.outputs])
            worst = max(worst, float((got - exact).abs().max()))
        if not worst < 1e-2:
            raise WrongResult(f"log probabilities are {worst:.2g} from transformers', expected 1e-2 at most")  # fmt: skip
        return f"log probabilities within {worst:.0e}"

    def same_beams(self, prompts: Prompts, outputs: dict[str, Outputs]) -> str:
        if outputs["octavo"] != outputs["transformers"]:
            raise WrongResult("the beams are not transformers'")
        return "all beams equal"


def measure(scenario: Scenario, rounds: int) -> dict:
    """Verified first, which is the warm-up too."""
    prompts = scenario.prompts(0)
    outputs = {name: run(prompts) for name, run in scenario.contenders.items()}
    remark = scenario.verify(prompts, outputs)
    seconds: dict[str, list[float]] = {name: [] for name in scenario.contenders}
    for number in range(1, rounds + 1):
        prompts = scenario.prompts(number)
        for name, run in scenario.contenders.items():
            started = time.perf_counter()
            run(prompts)
            seconds[name].append(time.perf_counter() - started)
    return {
        "scenario": scenario.name,
        "requests": scenario.num_requests,
        "tokens_per_s": {
            name: scenario.num_tokens / statistics.median(times) for name, times in seconds.items()
        },
        "verified": remark,
    }


def scenarios(bench: Bench, names: list[str], counts: list[int]) -> Iterator[Scenario]:
    for name in names:
        sizes = [4] if name in ("samples", "beams") else counts
        for count in sizes:
            yield getattr(bench, name)(count)


def print_rows(rows: list[dict], as_markdown: bool) -> None:
    """One line for each contender; the ratio is Octavo's speed over its."""
    columns = ("scenario", "requests", "contender", "tokens/s", "Octavo is", "verified")
    table = Table(box=SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, justify="right" if name in ("requests", "tokens/s", "Octavo is") else "left")  # fmt: skip
    lines = []
    for row in rows:
        own = row["tokens_per_s"]["octavo"]
        for name, speed in row["tokens_per_s"].items():
            ratio = "" if name == "octavo" else f"{own / speed:.2f}x"
            first = name == "octavo"
            lines.append(
                (row["scenario"] if first else "", str(row["requests"]) if first else "", name,
                 f"{speed:.1f}", ratio, row["verified"] if first else "")
            )  # fmt: skip
    if as_markdown:
        print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
        for line in lines:
            print("| " + " | ".join(line) + " |")
        return
    for line in lines:
        table.add_row(*line)
    console = Console()
    if not console.is_terminal:
        console.width = 140
    console.print(table)


def main() -> None:
    names = ["mixed", "uneven", "shared", "samples", "beams"]
    parser = argparse.ArgumentParser(description="Whole generations beside transformers.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--scenario", nargs="+", default=names, choices=names)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", help="write the figures to this file too")
    asked = parser.parse_args()
    bench = Bench(asked.model, asked.tokens)
    rows = []
    for scenario in scenarios(bench, asked.scenario, asked.requests):
        rows.append(measure(scenario, asked.rounds))
        print(json.dumps(rows[-1]), flush=True)  # as it comes: a whole run takes minutes
        if asked.json:
            with open(asked.json, "w") as file:
                json.dump(rows, file, indent=1)
    print(f"{torch.get_num_threads()} threads")
    print_rows(rows, asked.markdown)


if __name__ == "__main__":
    main()
