"""Adapters in one batch, each token with its own or none, equal to models into which each was merged."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import save_file

from octavo import SamplingParams
from octavo.models.adapters import Adapters
from octavo.runtime.params import LoRARequest
from octavo.tests.models.tiny import TinyModel

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# rank, scale, modules
KINDS = {
    "full": (4, 2.0, MODULES),
    "narrow": (1, 1.5, ("q_proj", "down_proj")),
    "wide": (8, 0.5, ("v_proj", "o_proj", "up_proj")),
}


def layers_of(model, modules):
    return {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in modules and isinstance(module, torch.nn.Linear)
    }


def weights_of(model, kind: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    rank, _, modules = KINDS[kind]
    generator = torch.Generator().manual_seed(sum(map(ord, kind)))
    return {
        name: (
            torch.randn(rank, module.in_features, generator=generator) * 0.4,
            torch.randn(module.out_features, rank, generator=generator) * 0.4,
        )
        for name, module in layers_of(model, modules).items()
    }


def save(model, kind: str, directory, **config) -> None:
    rank, scale, modules = KINDS[kind]
    tensors = {}
    for name, (a, b) in weights_of(model, kind).items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {"r": rank, "lora_alpha": scale * rank, "target_modules": list(modules), "bias": "none", **config}  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    return TinyModel()


@pytest.fixture(scope="module")
def requests(tiny, tmp_path_factory) -> dict[str | None, LoRARequest | None]:
    root = tmp_path_factory.mktemp("adapters")
    for kind in KINDS:
        save(tiny.reference, kind, root / kind)
    named = {kind: LoRARequest(kind, i, str(root / kind)) for i, kind in enumerate(KINDS, 1)}
    return {None: None, **named}


def merged(tiny, kind: str | None, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens of the reference with the adapter's product added to its weights."""
    model, added = tiny.reference, {}
    if kind is not None:
        for name, (a, b) in weights_of(model, kind).items():
            added[name] = KINDS[kind][1] * (b @ a)
    layers = dict(model.named_modules())
    try:
        with torch.no_grad():
            for name, delta in added.items():
                layers[name].weight += delta
            ids = list(prompt)
            for _ in range(num_tokens):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    finally:
        with torch.no_grad():
            for name, delta in added.items():
                layers[name].weight -= delta
    return ids[len(prompt) :]


def play(tiny, requests, seed: int, **config) -> None:
    """Requests with and without adapters, in chunks, with hits, preempted: each equals its merged model."""
    rng = random.Random(seed)
    engine = tiny.engine(
        rng.choice([14, 60]),
        max_loras=rng.choice([1, 2, 3]),
        max_num_batched_tokens=rng.choice([5, 9, 64]),
        max_num_seqs=4,
        **config,
    )
    shared = [rng.randrange(4, 60) for _ in range(9)]
    asked = {}
    for number in range(8):
        kind = rng.choice([None, *KINDS])
        prompt = shared[: rng.randint(1, 9)] + [rng.randrange(4, 60) for _ in range(3)]
        name, num_tokens = f"r{number}", rng.randint(1, 7)
        if kind is not None:
            tiny.adapters.register(requests[kind])
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        request = engine.add_request(name, prompt, params, lora_request=requests[kind])
        asked[name] = (kind, prompt, num_tokens, request)
        for _ in range(rng.randint(0, 3)):
            engine.step()
        if rng.random() < 0.3 and engine.scheduler.running:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running).request_id)
    while engine.has_unfinished():
        engine.step()
    for kind, prompt, num_tokens, request in asked.values():
        got = request.output().outputs[0].token_ids
        assert got == merged(tiny, kind, prompt, num_tokens), (seed, kind)


@pytest.mark.parametrize("ahead", [False, True], ids=["serial", "overlapped"])
def test_tokens_equal_those_of_merged_models(tiny, requests, ahead):
    """B69: every mixture of adapters and ranks, prefills that do not draw among them; fewer places than adapters."""
    for seed in range(8):
        play(tiny, requests, seed, async_scheduling=ahead)


def test_replayed_steps_are_those_without_an_adapter(tiny, requests):
    for seed in range(3):
        play(tiny, requests, seed, graph_sizes=(1, 2, 4))


def test_adapters_take_the_places_of_those_not_used_for_longest(tiny, requests):
    full, narrow, wide = (requests[kind] for kind in KINDS)
    adapters = Adapters(tiny.model, places=2, max_rank=8)
    for request in (full, narrow, wide):
        adapters.register(request)

    def step(*wanted):
        places, moves = adapters.plan(wanted)
        adapters.commit(places)
        return moves

    assert step(full, narrow) == [(full, 0), (narrow, 1)]
    assert step(full) == [] and step(full, full) == []
    assert step(wide) == [(wide, 1)], "narrow is the least recently used"
    assert step(narrow, wide) == [(narrow, 0)], "never the place of one that takes part"
    moves = adapters.plan([full])[1]
    assert moves == [(full, 1)] and step(full) == moves, "a plan changes nothing"
    with pytest.raises(
        ValueError, match="lora_request: expected at most 2 adapters in a step, got 3"
    ):
        adapters.plan([full, narrow, wide])


def test_an_adapter_that_was_forgotten_is_read_again(tiny, requests):
    """B70: neither what is left of it in its place takes effect, nor nothing at all."""
    full = requests["full"]
    adapters = Adapters(tiny.model, places=2, max_rank=8)
    with pytest.raises(ValueError, match="expected an adapter that is registered, got 'full'"):
        adapters.plan([full])
    adapters.register(full)
    adapters.commit(adapters.plan([full])[0])
    adapters.forget(full)
    with pytest.raises(ValueError, match="registered"):
        adapters.plan([full])
    adapters.register(full)
    assert adapters.plan([full])[1] == [(full, 0)]


def refused(tiny, tmp_path, tensors=None, match="", **config):
    save(tiny.reference, "full", tmp_path / "x", **config)
    if tensors is not None:
        save_file(tensors, tmp_path / "x" / "adapter_model.safetensors")
    adapters = Adapters(tiny.model, places=1, max_rank=6)
    with pytest.raises(ValueError, match=match):
        adapters.register(LoRARequest("x", 1, str(tmp_path / "x")))
    assert not adapters._known


def test_weights_that_name_no_layer_are_refused_by_name(tiny, tmp_path):
    """B70: an adapter that would have no effect, or part of one, is not taken."""
    name = "base_model.model.model.layers.0.self_attn.query.lora_A.weight"
    tensors = {name: torch.zeros(2, 32), name.replace("lora_A", "lora_B"): torch.zeros(32, 2)}
    refused(tiny, tmp_path, tensors, r"linear layers alone, got .* also .*self_attn\.query\.lora_A")


def test_a_layer_that_takes_no_adapter_is_refused(tiny, tmp_path):
    tensors = {"base_model.model.lm_head.lora_A.weight": torch.zeros(2, 32)}
    refused(tiny, tmp_path, tensors, r"also .*lm_head")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"a": (2, 31)}, r"expected A \[r, 32\] and B \[32, r\] of .*q_proj, got \[2, 31\]"),
        ({"b": (32, 3)}, r"expected A \[r, 32\]"),
        ({"a": (7, 32), "b": (32, 7)}, r"rank of 1 to 6 \(max_lora_rank\), got 7"),
        ({"b": None}, "expected lora_A and lora_B"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(tiny, tmp_path, changes, match):
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    shapes = {"a": (2, 32), "b": (32, 2), **changes}
    tensors = {name.format(k.upper()): torch.zeros(s) for k, s in shapes.items() if s is not None}
    refused(tiny, tmp_path, tensors, match)


@pytest.mark.parametrize("config", [{"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}], ids=str)  # fmt: skip
def test_what_these_layers_cannot_do_is_refused(tiny, tmp_path, config):
    refused(tiny, tmp_path, None, f"adapter_config.{next(iter(config))}: expected", **config)


def test_scales_as_peft_has_them(tiny, tmp_path):
    save(tiny.reference, "full", tmp_path / "a", use_rslora=True)
    save(tiny.reference, "full", tmp_path / "b", alpha_pattern={"q_proj": 1})
    adapters = Adapters(tiny.model, places=1, max_rank=4)
    plain = weights_of(tiny.reference, "full")
    scales = []
    for number, (name, end) in enumerate((("a", "q_proj"), ("b", "q_proj"), ("b", "k_proj")), 1):
        request = LoRARequest(f"{name}{end}", number, str(tmp_path / name))
        adapters.register(request)
        layer = f"model.layers.0.self_attn.{end}"
        ratio = adapters._known[request][layer][1] / plain[layer][1]
        scales.append(round(float(ratio.mean()), 5))
    assert scales == [
        8 / 2,
        1 / 4,
        2.0,
    ]  # alpha 8: over the root of 4, an alpha of 1 over 4, and 8 / 4


def test_one_id_is_one_adapter(tiny, requests):
    adapters = Adapters(tiny.model, places=1, max_rank=8)
    adapters.register(requests["full"])
    with pytest.raises(
        ValueError, match=r"lora_int_id: expected one of its own for 'other', got 1"
    ):
        adapters.register(LoRARequest("other", 1, requests["narrow"].lora_path))
    with pytest.raises(ValueError, match=r"lora_path: expected adapter_model\.safetensors"):
        adapters.register(LoRARequest("nowhere", 9, "/nowhere"))
    for places, rank, name in ((0, 8, "max_loras"), (1, 0, "max_lora_rank")):
        with pytest.raises(ValueError, match=f"{name}: expected"):
            Adapters(tiny.model, places, rank)
