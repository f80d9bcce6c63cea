"""The event loop: requests arrive, the scheduler chooses, the cost model says how long it takes, the clock moves on.

serial        | host 1 | .... device 1 .... | host 2 | .... device 2 .... |
async         | host 1 | .... device 1 .... | .... device 2 .... |            as in `scheduler/engine.py`
                       | host 2 |           | host 3 |

A request that arrives while a step runs is seen when the next one is put together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from ...scheduler import Scheduler, SchedulerConfig, SchedulerOutputs, SequenceGroup
from ...scheduler.admission import check_admissible
from .costs import StepTime, step_time, summed, work_of
from .devices import Device, ModelShape
from .result import RequestTimes, Series, SimulationResult, distributions
from .sampler import SamplerOutput, draw
from .workload import Workload


def simulate(
    workload: Workload,
    configs: Mapping[str, SchedulerConfig],
    *,
    model: ModelShape,
    device: Device,
    async_scheduling: bool = False,
) -> dict[str, SimulationResult]:
    """Run the same requests under each config; returns the results by the configs' names.

    Raises ValueError, before anything runs, if a request could never run to its end under one of them.
    """
    if not configs:
        raise ValueError("configs: expected at least one, got none")
    for name, config in configs.items():
        _check(workload, name, config)
    return {
        name: _Run(workload, config, model, device, async_scheduling).run(name)
        for name, config in configs.items()
    }


def _check(workload: Workload, name: str, config: SchedulerConfig) -> None:
    if workload.longest > config.max_model_len:
        raise ValueError(
            f"max_model_len: expected at least {workload.longest}, the longest request, got {config.max_model_len} in "
            f"config {name!r}"
        )
    for number in range(len(workload.requests)):
        try:
            check_admissible(workload.group(number), config)
        except ValueError as error:
            raise ValueError(f"config {name!r}, request {number}: {error}") from error


@dataclass
class _Flying:
    """A step in flight: what it draws, when it ends, and who gets a first token."""

    drawn: SamplerOutput
    end: float
    first_tokens: list[RequestTimes]


class _Run:
    """One policy. Seconds count from the beginning of the simulation."""

    def __init__(
        self,
        workload: Workload,
        config: SchedulerConfig,
        model: ModelShape,
        device: Device,
        async_scheduling: bool,
    ) -> None:
        self.workload, self.config = workload, config
        self.model, self.device = model, device
        self.scheduler = Scheduler(config)
        self.most_in_flight = 2 if async_scheduling else 1
        self.now = 0.0  # on the host
        self.device_free = 0.0
        self.flying: list[_Flying] = []
        self.num_arrived = self.num_told = 0
        self.times: dict[SequenceGroup, RequestTimes] = {}  # of unfinished requests
        self.ended: list[RequestTimes] = []
        self.step_times: list[StepTime] = []
        self.series = Series()
        self.num_fed_tokens = 0
        self.moved = {"copy": 0, "in": 0, "out": 0}
        self.used_block_seconds = 0.0

    def run(self, name: str) -> SimulationResult:
        while True:
            self._arrive()
            if not (self.scheduler.has_unfinished() or self.flying):
                if self.num_arrived == len(self.workload.requests):
                    return self._result(name)
                self.now = self.workload.requests[self.num_arrived].arrival
                continue
            num_told = self.num_told
            while len(self.flying) < self.most_in_flight and self._launch():
                self._arrive()
            if self.flying:
                self._conclude()
            elif self.num_told == num_told:
                raise RuntimeError("no progress: requests are unfinished, none can be scheduled")

    def _arrive(self) -> None:
        requests = self.workload.requests
        while self.num_arrived < len(requests):
            request = requests[self.num_arrived]
            if request.arrival > self.now:
                return
            group = self.workload.group(self.num_arrived)
            self.scheduler.add_seq_group(group)
            self.times[group] = RequestTimes(
                group.request_id, request.arrival, request.priority, request.prompt_len
            )
            self.num_arrived += 1

    def _launch(self) -> bool:
        """Put one more step together and start it, if there is one to be had now."""
        scheduler, flying = self.scheduler, self.flying
        outputs = scheduler.schedule_ahead() if flying else scheduler.schedule()
        if outputs is None:
            return False
        for group in outputs.ignored:
            self._end(group)
        if outputs.is_empty:
            return False
        first_tokens = self._note_firsts(outputs)
        work = work_of(outputs, self.config.sliding_window)
        took = step_time(work, self.model, self.device, self.config.block_size)
        self.now += took.host
        start = max(self.now, self.device_free)
        self.device_free = start + took.on_device
        drawn = draw(outputs.seq_group_metadata_list, self.workload.vocab_size)
        flying.append(_Flying(drawn, self.device_free, first_tokens))
        self.step_times.append(took)
        self.num_fed_tokens += work.num_tokens
        self.moved["copy"] += work.num_copied_blocks
        self.moved["in"] += work.num_blocks_in
        self.moved["out"] += work.num_blocks_out
        self._observe(start, work.num_tokens)
        return True

    def _note_firsts(self, outputs: SchedulerOutputs) -> list[RequestTimes]:
        """Who is scheduled for the first time begins now; returns who gets a first token from the step."""
        snapshots, first_tokens = outputs.seq_group_metadata_list, []
        others = outputs.scheduled_seq_groups[len(snapshots) - len(snapshots.others) :]
        for group, metadata in zip(others, snapshots.others, strict=True):
            times = self.times[group]
            if times.first_scheduled is None:
                times.first_scheduled = self.now
            if times.first_token is None and metadata.is_first_sample:
                first_tokens.append(times)
        return first_tokens

    def _observe(self, start: float, num_tokens: int) -> None:
        scheduler, series = self.scheduler, self.series
        device = scheduler.blocks.device
        self.used_block_seconds += device.num_used * (self.device_free - start)
        series.time.append(start)
        series.used_blocks.append(device.num_used)
        series.cached_blocks.append(device.num_cached)
        series.running.append(len(scheduler.running))
        series.swapped.append(len(scheduler.swapped))
        series.waiting.append(len(scheduler.waiting))
        series.batched_tokens.append(num_tokens)

    def _conclude(self) -> None:
        step = self.flying.pop(0)
        self.now = max(self.now, step.end)
        for times in step.first_tokens:
            times.first_token = step.end
        num_finished = self.scheduler.totals.num_finished
        changed = self.scheduler.update(step.drawn)
        if self.scheduler.totals.num_finished > num_finished:
            for group in changed:
                if group.is_finished:
                    self._end(group, step.end)

    def _end(self, group: SequenceGroup, end: float | None = None) -> None:
        times = self.times.pop(group)  # KeyError if it ends twice
        times.finished = self.now if end is None else end
        times.num_cached_tokens = group.metrics.num_cached_tokens
        times.num_preemptions = group.metrics.num_preemptions
        times.output_lens = [seq.num_output_tokens for seq in group.seqs]
        times.finish_reasons = [seq.status.value for seq in group.seqs]
        self.ended.append(times)
        self.num_told += 1

    def _result(self, name: str) -> SimulationResult:
        scheduler, series = self.scheduler, self.series
        totals = scheduler.totals
        scheduler.check_invariants()
        if scheduler.blocks.num_used_blocks or scheduler.blocks.host.num_used:
            raise RuntimeError("blocks are in use, though every request has ended")
        requests = sorted(self.ended, key=lambda times: int(times.request_id[1:]))
        num_prompt = sum(times.num_prompt_tokens for times in requests)
        num_output = sum(times.num_output_tokens for times in requests)
        asked = [request.num_output_tokens for request in self.workload.requests]
        missing = [n - times.num_output_tokens for n, times in zip(asked, requests, strict=True)]
        if min(missing) < 0:
            raise RuntimeError("a request has made more tokens than it was asked for")
        seconds = max(times.finished or 0.0 for times in requests) - requests[0].arrival
        steps = summed(self.step_times)
        return SimulationResult(
            policy=name,
            model=self.model.name,
            device=self.device.name,
            config=dataclasses.asdict(self.config),
            async_scheduling=self.most_in_flight > 1,
            workload=self.workload.description,
            num_requests=len(requests),
            seconds=seconds,
            num_steps=len(self.step_times),
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            num_fed_tokens=self.num_fed_tokens,
            input_tokens_per_s=num_prompt / seconds,
            output_tokens_per_s=num_output / seconds,
            **distributions(requests),
            num_recomputed=totals.num_recomputed,
            num_swapped_out=totals.num_swapped_out,
            num_blocks_swapped_out=self.moved["out"],
            num_blocks_swapped_in=self.moved["in"],
            num_blocks_copied=self.moved["copy"],
            num_cached_tokens=totals.num_cached_tokens,
            hit_rate=totals.num_cached_tokens / max(totals.num_prompt_tokens, 1),
            num_cut_short=sum(map(bool, missing)),
            peak_used_blocks=max(series.used_blocks, default=0),
            mean_used_blocks=self.used_block_seconds / max(steps.on_device, 1e-300),
            step_seconds=steps,
            series=series.thinned(),
            requests=requests,
        )
