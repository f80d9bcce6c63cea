"""Random operations in any order, shrunk to the shortest that fails.

OCTAVO_EXAMPLES=20000 pytest tests/scheduler/test_state_machines.py     runs longer than the 2000 examples of the usual run
"""

from __future__ import annotations

import os

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from octavo.runtime.metadata import NULL_BLOCK
from octavo.runtime.params import SamplingParams
from octavo.scheduler import BlockManager, Engine, Scheduler, SchedulerConfig
from octavo.scheduler.sequence import Sequence
from octavo.tests.scheduler.shadow import VOCAB, ShadowRunner, solo, solo_beams

EXAMPLES = int(os.environ.get("OCTAVO_EXAMPLES", "2000"))
SETTINGS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=20,
    deadline=None,
    derandomize="OCTAVO_EXAMPLES" not in os.environ,  # the usual run is the same for everybody
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


class BlockMachine(RuleBasedStateMachine):
    """B14, B36. A block manager beside plain dictionaries: `memory[block][offset]` is the prefix that was written there.

    After each operation every sequence reads its own prefixes from the blocks that its table names, and the blocks that
    count as taken are exactly those that some table names.
    """

    seqs = Bundle("seqs")
    swapped = Bundle("swapped")

    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.integers(1, 4),
        num_cpu_blocks=st.integers(0, 8),
        window=st.one_of(st.none(), st.integers(1, 9)),
        caching=st.booleans(),
    )
    def start(self, num_blocks, block_size, num_cpu_blocks, window, caching) -> None:
        self.size, self.window = block_size, window
        self.blocks = BlockManager(
            num_blocks,
            block_size,
            caching,
            num_cpu_blocks=num_cpu_blocks,
            sliding_window=window,
        )
        self.memory: dict[int, dict[int, tuple]] = {}
        self.host: dict[int, dict[int, tuple]] = {}
        self.live: list[Sequence] = []
        self.out: list[Sequence] = []
        self.number = 0

    def new_sequence(self, tokens: list[int]) -> Sequence:
        self.number += 1
        return Sequence(self.number, tokens)

    def write(self, seq: Sequence, stop: int) -> None:
        """As a step does: the tokens up to `stop` go to their slots."""
        table, tokens = self.blocks.table(seq.seq_id), seq.token_ids.tolist()
        for position in range(seq.num_computed_tokens, stop):
            block = int(table[position // self.size])
            assert self.blocks.ref_count[block] == 1, "written by one alone"
            self.memory.setdefault(block, {})[position % self.size] = tuple(tokens[: position + 1])
        seq.num_computed_tokens = stop

    def feed(self, seqs: list[Sequence], count: int) -> bool:
        if self.blocks.num_blocks_needed(seqs, count) > self.blocks.num_free_blocks:
            return False
        before = self.blocks.num_free_blocks - self.blocks.num_blocks_needed(seqs, count)
        copies = self.blocks.grow(seqs, count)
        assert self.blocks.num_free_blocks == before, "as many as was said"
        content = {source: dict(self.memory.get(source, {})) for source, _ in copies}
        for source, destination in copies:
            self.memory[destination] = dict(content[source])
        for seq in seqs:
            self.write(seq, seq.num_computed_tokens + count)
        return True

    @rule(target=seqs, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def admit(self, tokens):
        """Match, take, compute a first chunk."""
        seq = self.new_sequence(tokens)
        cached = self.blocks.match(seq, "", len(tokens))
        assert len(cached) * self.size < len(tokens), "something is left to compute"
        if self.blocks.num_evictable(cached) + 1 > self.blocks.num_free_blocks:
            return multiple()
        self.blocks.allocate(seq, cached)
        self.live.append(seq)
        return seq

    @rule(seq=seqs, count=st.integers(1, 6))
    def compute(self, seq, count) -> None:
        if seq in self.live:
            self.blocks.drop_out_of_window(seq)
            self.feed([seq], min(count, seq.num_uncomputed_tokens) or 0)

    @rule(seq=seqs, token=st.integers(0, 1))
    def draw(self, seq, token) -> None:
        if seq in self.live and seq.num_uncomputed_tokens == 0:
            seq.append(token, -0.1)

    @rule(target=seqs, seq=seqs, token=st.integers(0, 1))
    def fork(self, seq, token):
        if seq not in self.live:
            return multiple()
        self.number += 1
        child = seq.fork(self.number, 0)
        self.blocks.fork(seq, child)
        child.append(token, -0.1)
        self.live.append(child)
        return child

    @rule(seqs=st.lists(seqs, min_size=1, max_size=4))
    def compute_together(self, seqs) -> None:
        """One more token of each in one step: the sharers of a block all write to it."""
        group = [seq for seq in dict.fromkeys(seqs) if seq in self.live]
        group = [seq for seq in group if seq.num_uncomputed_tokens > 0]
        if group:
            self.feed(group, 1)

    @rule(seq=seqs)
    def publish(self, seq) -> None:
        if seq in self.live:
            self.blocks.publish(seq, "", 0)

    @rule(seq=consumes(seqs))
    def free(self, seq) -> None:
        self.blocks.free(seq)
        self.live = [other for other in self.live if other is not seq]
        self.out = [other for other in self.out if other is not seq]
        self.blocks.free(seq)  # as often as anybody likes

    @rule(seqs=st.lists(seqs, min_size=1, max_size=3))
    def swap_out(self, seqs) -> None:
        group = [seq for seq in dict.fromkeys(seqs) if seq in self.live]
        if not group or not self.blocks.can_swap_out(group):
            return
        pairs = self.blocks.swap_out(group)
        for source, destination in pairs:
            self.host[destination] = dict(self.memory.get(source, {}))
        self.live = [seq for seq in self.live if seq not in group]
        self.out += group

    @rule(count=st.integers(1, 3))
    def swap_in(self, count) -> None:
        group = self.out[:count]
        if self.blocks.num_blocks_to_swap_in(group) > self.blocks.num_free_blocks:
            return
        for source, destination in self.blocks.swap_in(group):
            self.memory[destination] = dict(self.host[source])
        self.out = self.out[count:]
        self.live += group

    @precondition(lambda self: hasattr(self, "blocks"))
    @rule()
    def reset(self) -> None:
        self.blocks.reset_prefix_cache()
        assert self.blocks.device.num_cached == 0

    @invariant()
    def all_read_their_own(self) -> None:
        if not hasattr(self, "blocks"):
            return
        self.blocks.check_integrity()
        for seq in self.live:
            self.check_table(seq, self.blocks.table(seq.seq_id).tolist(), self.memory)
        named = {b for seq in self.live for b in self.blocks.table(seq.seq_id).tolist()}
        assert self.blocks.num_used_blocks == len(named - {NULL_BLOCK})

    def check_table(self, seq: Sequence, table: list[int], memory) -> None:
        assert len(table) == -(-seq.num_computed_tokens // self.size)
        first = 0
        if self.window is not None:
            first = max(0, seq.num_computed_tokens - self.window + 1)
        tokens = seq.token_ids.tolist()
        for position in range(first, seq.num_computed_tokens):
            block = table[position // self.size]
            assert block != NULL_BLOCK
            assert memory[block][position % self.size] == tuple(tokens[: position + 1])

    def teardown(self) -> None:
        if hasattr(self, "blocks"):
            for seq in [*self.live, *self.out]:
                self.blocks.free(seq)
            assert self.blocks.num_used_blocks == 0 and self.blocks.host.num_used == 0


class SchedulerMachine(RuleBasedStateMachine):
    """Requests of any kind, in tiny pools, disturbed in any order; in the end all have had their solo run's tokens."""

    @initialize(
        num_gpu_blocks=st.integers(6, 14),
        num_cpu_blocks=st.integers(0, 14),
        block_size=st.integers(2, 4),
        seats=st.integers(2, 6),
        budget=st.sampled_from([3, 8, 64]),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        order=st.sampled_from(["decode-first", "prefill-first"]),
        mode=st.sampled_from(["auto", "recompute", "swap"]),
        window=st.one_of(st.none(), st.integers(1, 6)),
    )
    def start(self, num_gpu_blocks, num_cpu_blocks, block_size, seats, budget, caching, policy, order, mode, window):  # fmt: skip
        config = SchedulerConfig(
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            block_size=block_size,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            policy=policy,
            order=order,
            preemption_mode=mode,
            sliding_window=window,
            vocab_size=VOCAB,
            max_model_len=64,
        )
        self.scheduler = Scheduler(config)
        self.runner = ShadowRunner(block_size, window)
        self.engine = Engine(self.scheduler, self, check=True)
        self.asked: dict[str, tuple] = {}
        self.finished: dict[str, object] = {}
        self.aborted: set[str] = set()
        self.in_step: list = []

    def launch(self, metadata_list, **kwargs):
        """The runner, with what was asked to happen while it runs."""
        outputs = self.runner.launch(metadata_list, **kwargs)
        for event in self.in_step:
            event()
        self.scheduler.check_invariants()
        return outputs

    @rule(
        prompt=st.lists(st.integers(0, 3), min_size=1, max_size=14),
        max_tokens=st.integers(1, 6),
        width=st.integers(1, 3),
        beams=st.booleans(),
        priority=st.integers(-1, 1),
    )
    def add(self, prompt, max_tokens, width, beams, priority) -> None:
        config = self.scheduler.config
        if beams:
            params = SamplingParams(
                use_beam_search=True, n=width, temperature=0, max_tokens=max_tokens
            )
        else:
            params = SamplingParams(n=width, max_tokens=max_tokens)
        name = f"r{len(self.asked)}"
        shared = len(prompt) // config.block_size
        longest = -(-(len(prompt) + max_tokens) // config.block_size)
        if shared + width * (longest - shared) > config.num_gpu_blocks or width > config.num_seats:
            return  # its solo run would be cut short
        self.engine.add_request(name, prompt, params, priority=priority)
        self.asked[name] = (prompt, params)

    def pick(self, index: int) -> str | None:
        groups = self.scheduler.groups
        return groups[index % len(groups)].request_id if groups else None

    def end(self, index: int) -> None:
        name = self.pick(index)
        if name is not None:
            self.aborted.add(name)
            self.engine.abort(name)

    @rule(index=st.integers(0, 9))
    def abort(self, index) -> None:
        self.end(index)

    @rule(index=st.integers(0, 9))
    def preempt(self, index) -> None:
        name = self.pick(index)
        if name is not None:
            self.scheduler.preempt(name)

    @rule(late=st.sampled_from(["", "", "abort", "preempt", "fail"]), index=st.integers(0, 9))
    def step(self, late, index) -> None:
        if not self.engine.has_unfinished():
            return
        if late == "abort":
            self.in_step = [lambda: self.end(index)]
        elif late == "preempt":
            self.in_step = [lambda: self.preempt(index=index)]
        elif late == "fail":
            self.in_step = [self.fail]
        try:
            changed = self.engine.step()
        except OSError:
            changed = []
        self.in_step = []
        for request in changed:
            if request.finished:
                name = request.group.request_id
                assert name not in self.finished, "one terminal event each"
                self.finished[name] = request

    @staticmethod
    def fail() -> None:
        raise OSError("the step failed")

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_unfinished():
                break
            self.step(late="", index=0)
        assert set(self.finished) == set(self.asked)
        assert self.scheduler.blocks.num_used_blocks == 0
        assert self.scheduler.blocks.host.num_used == 0
        for name, (prompt, params) in self.asked.items():
            if name in self.aborted:
                continue
            got = [seq.output_token_ids.tolist() for seq in self.finished[name].group.seqs]
            if params.use_beam_search:
                expected = [tokens for tokens, _ in solo_beams(prompt, params, params.max_tokens)]
            else:
                expected = [solo(prompt, params.max_tokens, index) for index in range(params.n)]
            assert got == expected


BlockMachine.TestCase.settings = SETTINGS
SchedulerMachine.TestCase.settings = SETTINGS
TestBlockManager = BlockMachine.TestCase
TestScheduler = SchedulerMachine.TestCase
