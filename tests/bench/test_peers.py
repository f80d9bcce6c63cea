"""Peers compute attention, or refuse; their adapters give each library what its arguments mean.

vLLM, SGLang and FlashInfer are stood in for by plain loops that read the arguments as those libraries document them. Where
the environment variable OCTAVO_PEERS names a folder with vllm/ and sglang/ (docs/peers.md), their own kernels run too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octavo.bench.attention_problem import AttentionShape, WrongResult, make_problem
from octavo.bench.batch_specs import BatchSpec
from octavo.bench.peers import ATTENTION_PEERS, Unsupported, parse_peer
from octavo.bench.peers._sources import import_sources
from octavo.bench.peers.flex_attention import FlexAttention

FP32 = AttentionShape(4, 2, 16, dtype=torch.float32)
WINDOW = AttentionShape(4, 2, 16, dtype=torch.float32, window=10)
SOFTCAP = AttentionShape(4, 2, 16, dtype=torch.float32, softcap=3.0)
ONE_TOKEN = AttentionShape(4, 2, 16, dtype=torch.float32, window=1)
HEADS = AttentionShape(2, 2, 16, block_size=8, dtype=torch.float16, window=16)
FP8 = AttentionShape(4, 2, 16, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn)
SHAPES = (FP32, WINDOW, SOFTCAP, ONE_TOKEN, HEADS, FP8)
# decodes of one and of several lengths; a prompt; prompts; chunks after a context; all of them
BATCHES = (
    "3q1s32",
    "2q1s33_q1s7",
    "q20",
    "q9_q20",
    "q12s45",
    "2q8s40_q17s30",
    "2q1s37_q5s5_q19s33",
)


def problem_of(batch: str, shape: AttentionShape = FP32):
    return make_problem(BatchSpec.parse(batch), shape, seed=1)


# ---------------------------------------------------------------- names


def test_names_and_paths(tmp_path):
    for name in ATTENTION_PEERS:
        assert parse_peer(name).name == name
    assert parse_peer(f"vllm={tmp_path}").name == "vllm"


@pytest.mark.parametrize("text", ["vLLM", "", "vllm=/no/such/folder", "sdpa=.", "=."])
def test_what_is_no_peer(text):
    with pytest.raises(ValueError, match="peer: "):
        parse_peer(text)


def test_a_wrong_name_is_answered_with_the_right_ones():
    with pytest.raises(ValueError, match=r"sdpa, sdpa\+gather, flex.*got 'flash'"):
        parse_peer("flash")


def test_the_package_imports_no_peer():
    code = "import octavo.bench.peers, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", ["vllm", "sglang", "flashinfer"])
def test_a_folder_without_the_peer(name, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    reason = parse_peer(f"{name}={tmp_path}").unavailable()
    assert reason is not None and name in reason
    (tmp_path / name).mkdir()
    if name != "flashinfer":
        reason = parse_peer(f"{name}={tmp_path}").unavailable()
        assert reason is not None and "has no" in reason


# ---------------------------------------------------------------- a wrong peer is not timed


def test_a_peer_that_ignores_the_last_token():
    problem = problem_of("2q1s300_q1s2048")
    shorter = BatchSpec(problem.batch.query_lens, tuple(n - 1 for n in problem.batch.seq_lens))
    out = torch.cat([replace(problem, batch=shorter).expected(seq, [0]) for seq in range(3)])
    with pytest.raises(WrongResult, match="relative error"):
        problem.verify(out)


@pytest.mark.parametrize("batch", BATCHES)
def test_a_peer_whose_window_is_one_off(batch):
    problem = problem_of(batch, WINDOW)
    for window in (9, 11):
        other = replace(problem, shape=replace(WINDOW, window=window))
        out = parse_peer("sdpa").prepare(other)()
        with pytest.raises(WrongResult, match="relative error"):
            problem.verify(out)


def test_a_peer_with_another_shape_or_no_number():
    problem = problem_of("q20")
    right = parse_peer("sdpa").prepare(problem)()
    assert problem.verify(right) < 1e-5
    with pytest.raises(WrongResult, match="expected shape"):
        problem.verify(right.transpose(0, 1))
    right[-1, 0, 0] = torch.nan
    with pytest.raises(WrongResult, match="finite"):
        problem.verify(right)


# ---------------------------------------------------------------- torch's own


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["sdpa", "sdpa+gather"])
def test_sdpa(name, batch, shape):
    problem = problem_of(batch, shape)
    if shape.softcap is not None:
        with pytest.raises(Unsupported, match="soft cap"):
            parse_peer(name).prepare(problem)
        return
    problem.verify(parse_peer(name).prepare(problem)())


@pytest.mark.parametrize("shape", [WINDOW, SOFTCAP, HEADS, FP8], ids=str)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention(shape):
    """Uncompiled: the same mask, scores and layout; compiling takes ten seconds a shape."""
    problem = problem_of("2q1s37_q1s5_q19s33", shape)
    problem.verify(FlexAttention(is_gather_timed=True, is_compiled=False).prepare(problem)())


@pytest.mark.parametrize("shape", [FP32, FP8], ids=str)
def test_what_is_timed(shape):
    """The call sees the cache as it is now, or the lower bound as it was when prepared."""
    problem = problem_of("2q1s33_q19s33", shape)
    with_gather = parse_peer("sdpa+gather").prepare(problem)
    without = parse_peer("sdpa").prepare(problem)
    problem.v_cache.copy_(problem.v_cache.float().neg())
    problem.verify(with_gather())
    with pytest.raises(WrongResult):
        problem.verify(without())


# ---------------------------------------------------------------- peers read from a folder

ATTEND = """
import math
import torch

def attend(q, keys, values, scale, softcap):
    out = torch.empty_like(q)
    for head in range(q.shape[0]):
        group = head // (q.shape[0] // keys.shape[1])
        scores = [float(q[head].double() @ key.double()) * scale for key in keys[:, group]]
        if softcap > 0:
            scores = [softcap * math.tanh(score / softcap) for score in scores]
        weights = [math.exp(score - max(scores)) for score in scores]
        total = sum(w * value.double() for w, value in zip(weights, values[:, group], strict=True))
        out[head] = (total / sum(weights)).to(q.dtype)
    return out
"""

VLLM = """
import torch
import vllm.envs as envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.attend import attend
from vllm.v1.kv_cache_interface import KVQuantMode

init_logger(__name__).debug_once("imported")
is_batch_invariant = envs.VLLM_BATCH_INVARIANT
assert current_platform.fp8_dtype() == torch.float8_e4m3fn

def unified_attention(q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal,
                      window_size, block_table, softcap, q_descale, k_descale, v_descale, seq_threshold_3D=None,
                      num_par_softmax_segments=None, softmax_segm_output=None, softmax_segm_max=None,
                      softmax_segm_expsum=None, kv_quant_mode=KVQuantMode.NONE):
    assert causal and q_descale is None and not is_batch_invariant
    assert (kv_quant_mode == KVQuantMode.FP8_PER_TENSOR) == (k.dtype == current_platform.fp8_dtype())
    assert seq_threshold_3D == 128 // k.shape[2]
    rows = (seq_threshold_3D, q.shape[1], num_par_softmax_segments)
    assert softmax_segm_max.shape == softmax_segm_expsum.shape == rows
    assert softmax_segm_output.shape == (*rows, triton.next_power_of_2(q.shape[2]))
    assert block_table.shape[1] * k.shape[1] % 128 == 0 and block_table.stride(1) == 1
    assert max_seqlen_k == max(seqused_k.tolist())
    for seq, length in enumerate(seqused_k.tolist()):
        first, end = cu_seqlens_q[seq : seq + 2].tolist()
        assert 0 < end - first <= max_seqlen_q
        for row in range(first, end):
            position = length - (end - row)
            start = 0 if window_size[0] < 0 else max(0, position - window_size[0])
            assert window_size[1] == (-1 if window_size[0] < 0 else 0)
            cached = [
                torch.stack([cache[block_table[seq, i // k.shape[1]], i % k.shape[1]].float() * scale[seq, 0]
                             for i in range(start, position + 1)])
                for cache, scale in ((k, k_descale), (v, v_descale))
            ]
            out[row] = attend(q[row], *cached, softmax_scale, softcap)
"""

SGLANG_DECODE = """
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention.triton_ops.attend import attend
from sglang.srt.utils import is_cuda, is_hip

assert not is_hip() and not envs.SGLANG_ANYTHING.get()

def decode_attention_fwd(q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse, num_kv_splits,
                         max_kv_splits, sm_scale, k_scale, v_scale, logit_cap=0.0):
    assert attn_logits.shape == (*q.shape[:2], max_kv_splits, q.shape[2]) and attn_lse.shape == attn_logits.shape[:3]
    assert attn_logits.dtype == attn_lse.dtype == torch.float32
    assert num_kv_splits.shape == q.shape[:1] and 1 <= num_kv_splits.min() <= num_kv_splits.max() <= max_kv_splits
    assert k_scale == v_scale == 1 and k_buffer.dim() == v_buffer.dim() == 3
    for seq in range(len(q)):
        slots = kv_indices[kv_indptr[seq] : kv_indptr[seq + 1]]
        o[seq] = attend(q[seq], k_buffer[slots], v_buffer[slots], sm_scale, logit_cap)
"""

# an older release: no scales
SGLANG_EXTEND = """
import torch
from sglang.srt.layers.attention.triton_ops.attend import attend

def extend_attention_fwd(q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices,
                         custom_mask, is_causal, mask_indptr, max_len_extend, sm_scale=None, logit_cap=0.0,
                         skip_prefix_custom_mask=True, sliding_window_size=-1):
    assert custom_mask is None and mask_indptr is None and is_causal
    assert all(x.is_contiguous() for x in (q_extend, k_extend, v_extend, o_extend))
    assert k_extend.dtype == v_extend.dtype == q_extend.dtype
    for seq in range(len(qo_indptr) - 1):
        slots = kv_indices[kv_indptr[seq] : kv_indptr[seq + 1]]
        first, end = qo_indptr[seq : seq + 2].tolist()
        assert 0 < end - first <= max_len_extend
        keys = torch.cat([k_buffer[slots].to(k_extend.dtype), k_extend[first:end]])
        values = torch.cat([v_buffer[slots].to(v_extend.dtype), v_extend[first:end]])
        for row in range(first, end):
            last = len(slots) + row - first
            start = max(0, last - sliding_window_size) if sliding_window_size > 0 else 0
            visible = slice(start, last + 1)
            o_extend[row] = attend(q_extend[row], keys[visible], values[visible], sm_scale, logit_cap)
"""


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return folder


@pytest.fixture
def vllm_folder(tmp_path):
    ops = "vllm/v1/attention/ops"
    return write(
        tmp_path,
        {
            "vllm/__init__.py": "raise RuntimeError('vLLM started')",
            f"{ops}/attend.py": ATTEND,
            f"{ops}/triton_unified_attention.py": VLLM,
        },
    )


@pytest.fixture
def sglang_folder(tmp_path):
    ops = "python/sglang/srt/layers/attention/triton_ops"
    return write(
        tmp_path,
        {
            "python/sglang/__init__.py": "raise RuntimeError('SGLang started')",
            f"{ops}/attend.py": ATTEND,
            f"{ops}/decode_attention.py": SGLANG_DECODE,
            f"{ops}/extend_attention.py": SGLANG_EXTEND,
        },
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_vllm_arguments(vllm_folder, shape):
    peer = parse_peer(f"vllm={vllm_folder}")
    assert peer.unavailable() is None
    for batch in BATCHES:
        problem = problem_of(batch, shape)
        problem.verify(peer.prepare(problem)())
    assert not [name for name in sys.modules if name.partition(".")[0] == "vllm"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sglang_arguments(sglang_folder, shape):
    peer = parse_peer(f"sglang={sglang_folder}")
    assert peer.unavailable() is None
    for batch in BATCHES:
        problem = problem_of(batch, shape)
        only_decodes = problem.batch.num_decodes == problem.batch.num_seqs
        reads_cache = problem.batch.query_lens != problem.batch.seq_lens
        if (shape is ONE_TOKEN and not only_decodes) or (shape is FP8 and reads_cache):
            with pytest.raises(Unsupported, match=r"window of one|rounded to fp8"):
                peer.prepare(problem)
            continue
        problem.verify(peer.prepare(problem)())
    assert not [name for name in sys.modules if name.partition(".")[0] == "sglang"]


def test_a_module_that_has_no_stand_in_is_named(tmp_path):
    write(tmp_path, {"vllm/new.py": "from vllm.config import get_config"})
    with pytest.raises(ModuleNotFoundError, match=r"vllm\.config is not in"):
        import_sources(tmp_path / "vllm", ["vllm.new"], {})
    assert "vllm.new" not in sys.modules


def test_an_imported_package_is_left_alone(vllm_folder, monkeypatch):
    installed = types.ModuleType("vllm")
    monkeypatch.setitem(sys.modules, "vllm", installed)
    problem = problem_of("q20")
    problem.verify(parse_peer(f"vllm={vllm_folder}").prepare(problem)())
    assert sys.modules["vllm"] is installed


# ---------------------------------------------------------------- FlashInfer


class FakeWrapper:
    """Both wrappers' `run`, from the definition of their plan: pages of each request, its queries at its end."""

    made: list[FakeWrapper]  # filled by a subclass that a test makes

    def keep(self, workspace, kv_layout) -> None:
        assert kv_layout == "NHD" and workspace.dtype == torch.uint8 and not workspace.any()
        self.made.append(self)

    def keep_plan(self, query_indptr, indptr, indices, last_page_len, heads, **options) -> None:
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        self.query_indptr, self.indptr = query_indptr, indptr
        self.indices, self.last_page_len, self.heads = indices, last_page_len, heads
        self.options = options

    def run(self, q, paged_kv_cache, *, out=None):
        namespace: dict = {}
        exec(ATTEND, namespace)
        k_cache, v_cache = paged_kv_cache
        options, page_size = self.options, k_cache.shape[1]
        assert self.heads == (q.shape[1], k_cache.shape[2], q.shape[2], page_size)
        assert (options["q_data_type"], options["kv_data_type"]) == (q.dtype, k_cache.dtype)
        for request, last_page_len in enumerate(self.last_page_len.tolist()):
            assert 1 <= last_page_len <= page_size
            pages = self.indices[self.indptr[request] : self.indptr[request + 1]].long()
            length = (len(pages) - 1) * page_size + last_page_len
            keys, values = (
                cache.float()[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache)
            )
            first, end = self.query_indptr[request : request + 2].tolist()
            for row in range(first, end):
                position = length - (end - row)
                left = options["window_left"]
                visible = slice(0 if left == -1 else max(0, position - left), position + 1)
                out[row] = namespace["attend"](
                    q[row], keys[visible], values[visible], options["sm_scale"], options["logits_soft_cap"]
                )  # fmt: skip
        return out


@pytest.fixture
def flashinfer(monkeypatch):
    class Decode(FakeWrapper):
        made: list[FakeWrapper] = []  # noqa: RUF012

        def __init__(self, float_workspace_buffer, kv_layout="NHD", *, use_tensor_cores=False):
            self.use_tensor_cores = use_tensor_cores
            self.keep(float_workspace_buffer, kv_layout)

        def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
                 pos_encoding_mode, window_left, logits_soft_cap, q_data_type, kv_data_type, sm_scale):  # fmt: skip
            assert pos_encoding_mode == "NONE"
            heads = (num_qo_heads, num_kv_heads, head_dim, page_size)
            self.keep_plan(
                torch.arange(len(indptr)), indptr, indices, last_page_len, heads, window_left=window_left,
                logits_soft_cap=logits_soft_cap, q_data_type=q_data_type, kv_data_type=kv_data_type, sm_scale=sm_scale,
            )  # fmt: skip

    class Prefill(FakeWrapper):
        made: list[FakeWrapper] = []  # noqa: RUF012

        def __init__(self, float_workspace_buffer, kv_layout="NHD"):
            self.keep(float_workspace_buffer, kv_layout)

        def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
                 head_dim_qk, page_size, *, causal=False, pos_encoding_mode, window_left, logits_soft_cap, q_data_type,
                 kv_data_type, sm_scale):  # fmt: skip
            assert causal and pos_encoding_mode == "NONE" and qo_indptr.dtype == torch.int32
            heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
            self.keep_plan(
                qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, heads, window_left=window_left,
                logits_soft_cap=logits_soft_cap, q_data_type=q_data_type, kv_data_type=kv_data_type, sm_scale=sm_scale,
            )  # fmt: skip

    library = types.ModuleType("flashinfer")
    library.BatchDecodeWithPagedKVCacheWrapper = Decode
    library.BatchPrefillWithPagedKVCacheWrapper = Prefill
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr("octavo.bench.peers.flashinfer._WORKSPACE_BYTES", 1024)
    return library


@pytest.mark.parametrize(
    ("window", "softcap", "cache_dtype"),
    [
        (None, None, None),
        (1, None, None),
        (10, None, None),
        (None, 1.0, None),
        (None, None, torch.float8_e4m3fn),
    ],
)
def test_flashinfer_arguments(flashinfer, window, softcap, cache_dtype):
    shape = AttentionShape(
        2, 1, 64, dtype=torch.float16, window=window, softcap=softcap, cache_dtype=cache_dtype
    )
    for batch in BATCHES:
        problem = problem_of(batch, shape)
        problem.verify(parse_peer("flashinfer").prepare(problem)())
    decodes, prefills = (getattr(flashinfer, f"Batch{kind}WithPagedKVCacheWrapper").made for kind in ("Decode", "Prefill"))  # fmt: skip
    assert (len(decodes), len(prefills)) == (3, 5), (
        "a decode never goes through the prefill wrapper"
    )
    assert not any(wrapper.use_tensor_cores for wrapper in decodes)


def test_flashinfer_uses_tensor_cores_for_wide_groups(flashinfer):
    problem = problem_of("q1s20", AttentionShape(4, 1, 64, dtype=torch.float16))
    problem.verify(parse_peer("flashinfer").prepare(problem)())
    assert flashinfer.BatchDecodeWithPagedKVCacheWrapper.made[0].use_tensor_cores


@pytest.mark.parametrize(
    ("shape", "reason"),
    [(FP32, "float32"), (AttentionShape(2, 1, 96), "head size 96")],
    ids=str,
)
def test_what_flashinfer_cannot_do(flashinfer, shape, reason):
    with pytest.raises(Unsupported, match=reason):
        parse_peer("flashinfer").prepare(problem_of("q20", shape))


# ---------------------------------------------------------------- the peers' own kernels


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_the_kernels_themselves(name):
    folder = os.environ.get("OCTAVO_PEERS")
    if folder is None:
        pytest.skip(f"OCTAVO_PEERS names no folder with a checkout of {name} (docs/peers.md)")
    peer = parse_peer(f"{name}={Path(folder) / name}")
    assert peer.unavailable() is None
    if os.environ.get("TRITON_INTERPRET") == "1":
        from octavo.kernels import interpreter

        interpreter.install()
    for batch in ("2q1s33_q1s7", "2q1s37_q19s33"):
        for window, softcap in ((None, None), (10, 3.0)):
            shape = AttentionShape(4, 2, 16, window=window, softcap=softcap)
            problem = problem_of(batch, shape)
            problem.verify(peer.prepare(problem)())


# ---------------------------------------------------------------- whole outputs


@pytest.fixture(scope="module")
def tiny_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=5, bos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


PROMPTS = [[7, 8, 9], [11] * 20, [3, 90, 41, 6, 77]]


def test_both_ways_to_generate_agree(tiny_model):
    from octavo.bench.peers.transformers import TransformersContinuous, TransformersStatic

    static, continuous = TransformersStatic(tiny_model), TransformersContinuous(tiny_model)
    assert static.unavailable() is None and continuous.unavailable() is None
    expected = static.generate(PROMPTS, 12)
    assert [[len(output) for output in outputs] for outputs in expected] == [[12]] * 3
    alone = [static.generate([prompt], 12)[0] for prompt in PROMPTS]
    assert expected == alone, "padding changes nothing"
    assert continuous.generate(PROMPTS, 12) == expected
    assert continuous.generate(PROMPTS[:1], 5) == [[expected[0][0][:5]]]
    assert continuous.generate([*PROMPTS, PROMPTS[0]], 12) == [*expected, expected[0]], (
        "more blocks"
    )
    assert static.generate(PROMPTS, 12) == expected, "the model's attention is as it was"


def test_beams(tiny_model):
    from octavo.bench.peers.transformers import TransformersContinuous, TransformersStatic

    static = TransformersStatic(tiny_model)
    outputs = static.generate(PROMPTS, 6, n=2, num_beams=3)
    assert [[len(output) for output in each] for each in outputs] == [[6, 6]] * 3
    assert all(first != second for first, second in outputs)
    with pytest.raises(Unsupported, match="without sampling"):
        static.generate(PROMPTS, 6, n=2)
    with pytest.raises(Unsupported, match="no beam search"):
        TransformersContinuous(tiny_model).generate(PROMPTS, 6, num_beams=2)
