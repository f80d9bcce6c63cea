"""After a step: its tokens go to their sequences, which grow, fork, and end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from ..runtime.metadata import SamplerOutput
from . import beam_search, logprobs
from .admission import most_output_tokens
from .beam_search import Continuation, Hypothesis
from .decode_batch import DecodeBatch
from .sequence import Sequence, SequenceGroup, SequenceStatus
from .step import Row, Step

if TYPE_CHECKING:
    from .logprobs import TokenDetail
    from .scheduler import Scheduler

_NOT_FINITE = "the model's logits were not finite"
Details = list["TokenDetail | None"] | None  # one for each sample of a row, where somebody asks


def write_back(scheduler: Scheduler, step: Step, outputs: SamplerOutput) -> list[SequenceGroup]:
    """Give each row of the step its tokens; returns the groups that got some."""
    changed, start = [], 0
    for prompt in outputs.prompts:
        logprobs.record_prompt(step, prompt)
    details = logprobs.by_place(outputs) if outputs.details else {}
    if step.decodes is not None:
        start = step.num_decodes
        if details:
            logprobs.record_decodes(step, details)
        reasons = _reasons_of_decodes(step, outputs) if outputs.errors else {}
        drawn = outputs.token_ids[:start], outputs.logprobs[:start]
        if step.decodes_left is not None:  # the others' numbers are not looked at
            drawn = [
                _spread(values, step.decodes_left, len(step.decodes.groups)) for values in drawn
            ]
        changed += _write_decodes(scheduler, step, drawn[0], drawn[1], reasons)
    for row in (*step.rows, *step.left_out):
        stop, group = start + row.num_samples, row.group
        counts = group.live and group not in step.voided
        if row.num_samples and counts:
            if group.metrics.first_token_time is None:
                group.metrics.first_token_time = time.perf_counter()
            write = _write_beams if group.sampling_params.use_beam_search else _write_samples
            drawn = outputs.token_ids[start:stop], outputs.logprobs[start:stop]
            places = range(start, stop)
            write(
                scheduler,
                row,
                *drawn,
                [details.get(place) for place in places] if details else None,
                [outputs.errors.get(place, _NOT_FINITE) for place in places],
            )
            changed.append(group)
        start = stop
        for seq in row.seqs:
            if seq.is_finished:
                scheduler.release(seq)  # waited for this step
        if group.is_finished:
            scheduler.release_encoder(group)
        elif counts and group in scheduler.batch.row_of:
            scheduler.batch.reread(group)  # it joined while this was drawn
        elif counts and _decodes_next(scheduler, group):
            scheduler.batch.join(group)
    for group in step.returned:
        if group.is_finished:
            for seq in group.seqs:
                scheduler.release(seq)
            scheduler.release_encoder(group)
    scheduler.blocks.release(step.fenced)
    for later in scheduler.flight:
        if later.decodes is not None:  # its tokens, and what they fill, are known only now
            scheduler.batch.publish_filled(later.decodes)
    return changed


def _decodes_next(scheduler: Scheduler, group: SequenceGroup) -> bool:
    """Just its newest token is left to feed, and no later step feeds anything of it."""
    is_due = not group.is_prefill and group.live[0].num_uncomputed_tokens == 1
    return is_due and DecodeBatch.takes(group) and not scheduler.flight.has(group)


def _spread(values: np.ndarray, rows: np.ndarray, num_rows: int) -> np.ndarray:
    spread = np.zeros(num_rows, values.dtype)
    spread[rows] = values
    return spread


def _reasons_of_decodes(step: Step, outputs: SamplerOutput) -> dict[SequenceGroup, str]:
    """Why groups of the batch have no token, where it is not the usual reason."""
    decodes, left = step.decodes, step.decodes_left
    assert decodes is not None
    return {
        decodes.groups[place if left is None else int(left[place])]: reason
        for place, reason in outputs.errors.items()
        if place < step.num_decodes
    }


def _write_decodes(
    scheduler: Scheduler,
    step: Step,
    token_ids: np.ndarray,
    logprobs: np.ndarray,
    reasons: dict[SequenceGroup, str],
) -> list[SequenceGroup]:
    """Columns at once; those out of the ordinary one by one."""
    batch, place, missing, dropped = scheduler.batch, step.decodes, None, set()
    assert place is not None
    if place.groups is not batch.groups:  # a later step is in flight, for which some came or went
        rows = [-1 if g in step.voided else place.row_of.get(g, -1) for g in batch.groups]
        index = np.array(rows, np.int64)
        missing = index < 0
        token_ids, logprobs = token_ids[index], logprobs[index]
        dropped = {group for group in place.groups if group not in batch.row_of}
    for row in batch.append(token_ids, logprobs, missing):
        group, seq = batch.groups[row], batch.seqs[row]
        if batch.is_leaving(group):  # it has ended, or lost its blocks, while the step ran
            dropped.add(group)
        elif missing is None or not missing[row]:
            token, logprob = int(token_ids[row]), float(logprobs[row])
            _write_sample(scheduler, group, seq, token, logprob, reasons.get(group, _NOT_FINITE))
            if not seq.is_finished:
                batch.reread(group)
    if not dropped and not step.voided:
        return place.groups
    for group, seq in zip(place.groups, place.seqs, strict=True):
        if group in dropped and seq.is_finished:
            scheduler.release(seq)
    return [g for g in place.groups if g not in dropped and g not in step.voided]


def _write_samples(
    scheduler: Scheduler,
    row: Row,
    token_ids: np.ndarray,
    logprobs: np.ndarray,
    details: Details,
    reasons: list[str],
) -> None:
    group, seqs = row.group, row.seqs
    if len(token_ids) > len(seqs):
        seqs = _fork_samples(scheduler, group)
    samples = zip(seqs, token_ids.tolist(), logprobs.tolist(), reasons, strict=True)
    for place, (seq, token, logprob, reason) in enumerate(samples):
        if not seq.is_finished:
            _set_detail(seq, details, place)
            _write_sample(scheduler, group, seq, token, logprob, reason)


def _set_detail(seq: Sequence, details: Details, place: int) -> None:
    if details is not None and (detail := details[place]) is not None:
        seq.set_detail(detail)


def _write_sample(
    scheduler: Scheduler,
    group: SequenceGroup,
    seq: Sequence,
    token: int,
    logprob: float,
    reason_for_none: str,
) -> None:
    if token < 0:
        scheduler.finish_sequence(group, seq, SequenceStatus.FINISHED_ABORTED, reason_for_none)
        return
    seq.append(token, logprob)
    end = _end_of(scheduler, group, seq, token)
    if end is not None:
        scheduler.finish_sequence(group, seq, *end)


def _fork_samples(scheduler: Scheduler, group: SequenceGroup) -> list[Sequence]:
    """The first tokens are drawn: siblings branch off the leader and share its blocks."""
    leader = group.seqs[0]
    for index in range(1, group.sampling_params.width):
        child = leader.fork(leader.seq_id + index, index)
        group.add_sample(child)
        scheduler.blocks.fork(leader, child)
    return group.seqs


def _end_of(
    scheduler: Scheduler, group: SequenceGroup, seq: Sequence, token: int
) -> tuple[SequenceStatus, int | None] | None:
    """(status, reason) if the sequence ends with this token, its last."""
    if token in group.eos_token_ids:
        return SequenceStatus.FINISHED_STOPPED, None
    if token in group.sampling_params.stop_token_ids:
        return SequenceStatus.FINISHED_STOPPED, token
    if seq.num_output_tokens >= most_output_tokens(group, scheduler.config):
        return SequenceStatus.FINISHED_LENGTH, None
    return None


# -- beam search


def _write_beams(
    scheduler: Scheduler,
    row: Row,
    token_ids: np.ndarray,
    logprobs: np.ndarray,
    details: Details,
    reasons: list[str],
) -> None:
    group, beams, params = row.group, row.seqs, row.group.sampling_params
    if any(seq.is_finished for seq in beams):
        return  # it ended meanwhile
    if (token_ids < 0).any():
        reason = reasons[int((token_ids < 0).argmax())]
        scheduler.finish_group(group, SequenceStatus.FINISHED_ABORTED, reason)
        return
    length = beams[0].num_output_tokens + 1
    longest = most_output_tokens(group, scheduler.config)
    going, ending = beam_search.choose(
        [seq.cumulative_logprob for seq in beams],
        token_ids.reshape(len(beams), row.num_candidates),
        logprobs.reshape(len(beams), row.num_candidates),
        frozenset((*group.eos_token_ids, *params.stop_token_ids)),
        length >= longest,
        params.width,
    )
    for step in ending:
        seq = beams[step.parent].fork(-1, 0)
        _set_detail(seq, details, step.place)
        seq.append(step.token_id, step.logprob)
        end = _end_of(scheduler, group, seq, step.token_id)
        assert end is not None
        seq.status, seq.stop_reason = end
        value = beam_search.score(step.cumulative_logprob, length, params.length_penalty)
        group.hypotheses.append(Hypothesis(value, seq))
    group.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
    del group.hypotheses[params.width :]
    best = going[0].cumulative_logprob if going else None
    if beam_search.is_over(best, group.hypotheses, length, longest, params):
        scheduler.end_search(group)
    else:
        _continue_beams(scheduler, group, beams, going, details)


def _continue_beams(
    scheduler: Scheduler,
    group: SequenceGroup,
    beams: list[Sequence],
    going: list[Continuation],
    details: Details,
) -> None:
    """Each continuation becomes a beam. The last one of a parent takes its place, those before are forked from it, and a
    parent without any ends: forks first, so that no shared block is given up in between."""
    last = {step.parent: rank for rank, step in enumerate(going)}
    used = {beams[parent].index for parent in last}
    spare = (i for i in range(group.sampling_params.width) if i not in used)
    appends: list[tuple[Sequence, Continuation]] = []
    children: list[Sequence] = []
    for rank, step in enumerate(going):
        parent = beams[step.parent]
        seq = parent
        if rank != last[step.parent]:
            seq = parent.fork(scheduler.next_seq_id(), next(spare))
            scheduler.blocks.fork(parent, seq)
            children.append(seq)
        appends.append((seq, step))
    for place, parent in enumerate(beams):
        if place not in last:
            scheduler.blocks.free(parent)
    for seq, step in appends:
        _set_detail(seq, details, step.place)
        seq.append(step.token_id, step.logprob)
    survivors = [beams[place] for place in sorted(last)]
    group.seqs = [*survivors, *children]
    group.live = group.seqs.copy()
    group.generation_id += 1


def conclude_search(group: SequenceGroup) -> None:
    """Make the best n hypotheses the request's completions. Beams that were cut short, by an abort or for want of blocks,
    count with what they have."""
    params = group.sampling_params
    cut_short = [
        Hypothesis(
            beam_search.score(seq.cumulative_logprob, seq.num_output_tokens, params.length_penalty),
            seq,
        )
        for seq in group.seqs
        if seq.is_finished and seq.num_output_tokens
    ]
    ended = sorted([*group.hypotheses, *cut_short], key=lambda hypothesis: -hypothesis.score)
    group.hypotheses = ended[: params.n]
    for index, hypothesis in enumerate(group.hypotheses):
        hypothesis.seq.index = index
    if ended:
        group.seqs = [hypothesis.seq for hypothesis in group.hypotheses]
