"""A new number of tokens never compiles a new variant of a kernel: a compilation in the middle of serving takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

# 1 and multiples of 16 are what Triton would specialise integer arguments on
LENGTHS = (1, 2, 16, 17, 48)


def rope_and_cache(num_tokens: int) -> None:
    from octavo.kernels.rotary_cache_write import rope_and_cache

    qkv = torch.empty(num_tokens, 15, 64, dtype=torch.bfloat16)
    pool = torch.empty(8, 2, 2, 16, 3, 64, dtype=torch.bfloat16)
    positions = torch.arange(num_tokens)
    for slots in (positions, positions[: num_tokens // 2]):
        q, k, v = qkv.split([9, 3, 3], dim=1)
        caches = pool[:, 1, 0], pool[:, 1, 1]
        rope_and_cache(positions, q, k, v, torch.empty(4096, 64), *caches, slots)


def reshape_and_cache(num_tokens: int) -> None:
    """From one token a program to as many as a tile holds, by both kernels."""
    from octavo.kernels.cache_write import reshape_and_cache

    k, pool = torch.empty(num_tokens, 2, 64), torch.empty(8, 2, 16, 2, 64)
    for caches in (pool, pool.char()):
        reshape_and_cache(k, k, caches[:, 0], caches[:, 1], torch.arange(num_tokens))


def norms(num_tokens: int) -> None:
    """Rows so short that several share a program."""
    from octavo.kernels.norm import rms_norm

    rms_norm(torch.empty(num_tokens, 64), torch.empty(64), 1e-6)


def around_attention(num_tokens: int) -> None:
    from octavo.kernels.activation import silu_and_mul
    from octavo.kernels.merge_states import merge_attention_states
    from octavo.kernels.rotary import rotary_embedding

    q, positions = torch.empty(num_tokens, 4, 64), torch.arange(num_tokens)
    rotary_embedding(positions, q, q[:, :2], torch.empty(99, 64))
    silu_and_mul(torch.empty(num_tokens, 512))
    merge_attention_states(q, q[..., 0].clone(), q.clone(), q[..., 1].clone())


def copy_blocks(num_pairs: int) -> None:
    """From one tile a program to eight."""
    from octavo.kernels.block_copy import copy_blocks

    ids = torch.arange(num_pairs)
    copy_blocks(torch.empty(2 * num_pairs, 4096), torch.stack((ids, ids + num_pairs), dim=1))


def lora(num_tokens: int) -> None:
    from octavo.kernels.lora import lora_expand, lora_shrink

    x, out = torch.empty(num_tokens, 256), torch.empty(num_tokens, 256)
    ranks, starts = torch.zeros(4, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    order = torch.zeros(num_tokens, dtype=torch.int32)
    y = lora_shrink(x, torch.empty(4, 16, 256), ranks, order, starts, 1.0)
    lora_expand(y, torch.empty(4, 256, 16), ranks, order, starts, out)


def sampling(num_rows: int) -> None:
    from octavo.kernels.penalties import apply_penalties
    from octavo.kernels.sampling import sample
    from octavo.kernels.top_k_top_p import apply_top_k_top_p_min_p

    logits, column, ids = torch.empty(num_rows, 999), torch.empty(num_rows), torch.arange(num_rows)
    counts = torch.empty(num_rows, 999, dtype=torch.int32)
    apply_penalties(logits, counts > 0, counts, column, column, column)
    apply_top_k_top_p_min_p(logits, ids.int(), column, column, column)
    sample(logits, column, ids, ids)


LAUNCHES = (
    rope_and_cache,
    reshape_and_cache,
    norms,
    around_attention,
    copy_blocks,
    lora,
    sampling,
)


def variants() -> dict[str, int]:
    """Compiled variants of each kernel after launches at every length, without a GPU."""
    from triton.runtime.jit import JITFunction

    from octavo.kernels.report import cases, compile

    counts, compiled = {}, JITFunction.run
    for launch in LAUNCHES:
        cases.CASES[launch.__name__] = lambda _, launch=launch: [launch(n) for n in LENGTHS]

    def run(self, *args, **kwargs):
        kernel = compiled(self, *args, **kwargs)
        counts[self.fn.__name__] = len(self.device_caches[0][0])
        return kernel

    JITFunction.run = run
    names = [launch.__name__ for launch in LAUNCHES]
    failed = [launch.error for launch in compile.compile_launches("sm_90", names) if launch.error]
    assert not failed, failed
    return counts


def test_one_variant_for_all_lengths() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "octavo.tests.kernels.test_variants"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert len(counts) >= len(LAUNCHES)
    assert counts == dict.fromkeys(counts, 1)


if __name__ == "__main__":
    print(json.dumps(variants()))
