"""Who may come in: requests that can never run are refused at once, and with admission "reserve" none comes in that could
make another lose its blocks."""

from __future__ import annotations

from collections.abc import Container, Iterable

import numpy as np

from .block_manager import cdiv
from .config import SchedulerConfig
from .sequence import SequenceGroup

_ALWAYS = 1 << 40  # steps


def check_admissible(group: SequenceGroup, config: SchedulerConfig) -> None:
    """Raise ValueError naming the numbers when the request could not run if it were alone."""
    prompt = group.seqs[0].prompt_token_ids
    if len(prompt) == 0:
        raise ValueError("prompt_token_ids: expected at least one token, got an empty prompt")
    _check_token_ids("prompt_token_ids", prompt, config)
    _check_sampling(group, config)
    _check_encoder(group, config)
    _check_spans(group, config)
    cross = num_cross_blocks(group, config)
    if len(prompt) + 1 > config.max_seq_len(cross):
        and_encoder = f", {cross} of them for the encoder" if cross else ""
        raise ValueError(
            f"prompt_token_ids: {len(prompt)} tokens and one to generate do not fit: max_model_len is "
            f"{config.max_model_len}, the KV pool holds {config.num_gpu_blocks} blocks of {config.block_size} tokens"
            f"{and_encoder}"
        )
    if group.num_seats > config.num_seats:
        name = "n" if group.sampling_params.best_of is None else "best_of"
        raise ValueError(
            f"{name}: expected at most {config.num_seats} (the seats), got {group.num_seats}"
        )
    if group.lora_request is not None and config.max_loras == 0:
        raise ValueError(
            f"lora_request: expected None, the model takes no adapters, got {group.lora_request!r}"
        )
    if group.prompt_adapter_request is not None:
        raise ValueError(
            "prompt_adapter_request: expected None, no model takes one, got "
            f"{group.prompt_adapter_request!r}"
        )
    if config.admission == "reserve":
        peak = peak_blocks([group], config)
        if peak > config.num_gpu_blocks:
            raise ValueError(
                f"max_tokens: the request may come to hold {peak} blocks, the KV pool has {config.num_gpu_blocks}"
            )


def _check_token_ids(name: str, token_ids: np.ndarray, config: SchedulerConfig) -> None:
    limit = config.vocab_size
    if limit is not None and not (token_ids.min() >= 0 and token_ids.max() < limit):
        bad = int(token_ids.min()) if token_ids.min() < 0 else int(token_ids.max())
        raise ValueError(f"{name}: expected ids in [0, {limit}), got {bad}")


def _check_sampling(group: SequenceGroup, config: SchedulerConfig) -> None:
    vocab, params = config.vocab_size, group.sampling_params
    if vocab is None:
        return
    for name, token_ids in params.token_id_lists():
        if token_ids and max(token_ids) >= vocab:
            raise ValueError(f"{name}: expected ids in [0, {vocab}), got {max(token_ids)}")
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > vocab:
            raise ValueError(f"{name}: expected at most {vocab} (the vocabulary), got {count}")


def _check_encoder(group: SequenceGroup, config: SchedulerConfig) -> None:
    encoder = group.encoder_seq
    if encoder is None:
        return
    most = min(config.max_encoder_len, config.max_num_batched_tokens - 1)
    if config.max_encoder_len == 0:
        raise ValueError(
            f"encoder_seq: expected None, the model has no encoder, got {encoder.num_tokens} tokens"
        )
    if not 1 <= encoder.num_tokens <= most:
        raise ValueError(
            f"encoder_seq: expected 1 to {most} tokens (max_encoder_len is {config.max_encoder_len}, and a step that runs "
            f"the encoder has {config.max_num_batched_tokens} tokens), got {encoder.num_tokens}"
        )
    _check_token_ids("encoder_seq", encoder.token_ids, config)


def _check_spans(group: SequenceGroup, config: SchedulerConfig) -> None:
    stop = 0
    # the encoder runs in the step of the prompt's first chunk
    most = config.max_num_batched_tokens - group.num_encoder_tokens_to_feed
    for span in group.seqs[0].spans:
        if not config.is_multi_modal:
            raise ValueError("multi_modal_spans: expected none, the model takes text alone")
        if span.offset < stop or span.stop > group.num_prompt_tokens:
            raise ValueError(
                f"multi_modal_spans: expected spans in order, apart, and within the prompt's {group.num_prompt_tokens} "
                f"tokens, got one from {span.offset} to {span.stop}"
            )
        stop = span.stop
        window = config.sliding_window
        if window is not None and span.is_whole:
            num_blocks = cdiv(window - 1 + span.length, config.block_size) + 1
            most_blocks = config.num_gpu_blocks - num_cross_blocks(group, config)
            if num_blocks > most_blocks:
                raise ValueError(
                    f"multi_modal_spans: expected spans that fit into {most_blocks} blocks where they cannot be split, with "
                    f"the window before them, got one of {span.length} tokens, which may take {num_blocks}"
                )
        if span.is_whole and span.length > most:
            raise ValueError(
                f"multi_modal_spans: expected spans of at most {most} tokens where they cannot be split "
                f"(max_num_batched_tokens less the encoder's), got one of {span.length}"
            )


def most_output_tokens(group: SequenceGroup, config: SchedulerConfig) -> int:
    """Tokens that each of the request's sequences may generate in all."""
    room = config.max_seq_len(num_cross_blocks(group, config)) - group.num_prompt_tokens
    max_tokens = group.sampling_params.max_tokens
    return room if max_tokens is None else min(room, max_tokens)


def num_cross_blocks(group: SequenceGroup, config: SchedulerConfig) -> int:
    encoder = group.encoder_seq
    return 0 if encoder is None else cdiv(encoder.num_tokens, config.block_size)


def peak_blocks(
    groups: Iterable[SequenceGroup],
    config: SchedulerConfig,
    drawing: Container[SequenceGroup] = (),
) -> int:
    """Most blocks these groups can hold at once from now on, if each of them runs to its longest.

    drawing   groups whose next token a step in flight draws: they feed it in the step to come

    A group of L tokens that may feed R more holds, t steps from now, blocks for min(L + t, L + R) tokens of each of its
    sequences (the prompt's full blocks once), as long as t <= R + d. Decodes advance in every step, so for them d = 0; a
    prefill may wait up to d steps for its turn, longer than any time where no bound is known. Blocks are given up only
    where a lifetime ends, so the peak is at one of those ends:

        peak = max over i of  sum over j with end_j >= end_i  of  blocks_j(end_i),      end = R + d

    Exact when nobody is being prefilled, no window drops blocks and nothing is shared between requests, else an upper bound.
    """
    size, table = config.block_size, []
    delay, waiting_tokens = _ALWAYS if config.policy == "priority" else 0, 0
    for group in groups:
        leader = group.live[0]
        limit = most_output_tokens(group, config) - leader.num_output_tokens
        is_drawing = group in drawing  # one token further than what is known
        if group.is_prefill and not is_drawing:
            waiting_tokens += group.num_tokens_to_feed()
            # several live sequences catch up after a preemption, one after the other: no bound is known
            is_split = config.enable_chunked_prefill and len(group.live) == 1
            is_split = is_split and group.encoder_seq is None
            is_split = is_split and not any(span.is_whole for span in leader.spans)
            own_delay = delay = max(
                delay, _longest_wait(waiting_tokens, config) if is_split else _ALWAYS
            )
        else:
            own_delay = _ALWAYS if config.policy == "priority" else 0
        seqs = group.num_seats
        shared = group.num_prompt_tokens // size if seqs > 1 else 0
        cross = num_cross_blocks(group, config)
        # the last token drawn is not fed any more
        num_tokens, rest = leader.num_tokens + is_drawing, max(limit - 1 - is_drawing, 0)
        table.append((num_tokens, rest, own_delay, seqs, shared, cross))
    if not table:
        return 0
    tokens, rest, delays, seqs, shared, cross = np.array(table, np.int64).T
    ends = rest + delays
    own = -(-(tokens + np.minimum(ends[:, None], rest)) // size) - shared
    held = shared + seqs * own  # [i, j]: by group j when group i ends
    if config.sliding_window is not None:
        # a step feeds a sequence up to the budget, and the next one drops what its window has passed
        fed = np.minimum(tokens + rest, config.max_num_batched_tokens)
        held = np.minimum(held, seqs * (-(-(config.sliding_window - 1 + fed) // size) + 1))
    held += cross
    return int(np.where(ends >= ends[:, None], held, 0).sum(axis=1).max())


def _longest_wait(num_tokens: int, config: SchedulerConfig) -> int:
    """Steps before the one that feeds the last of so many tokens, when every seat takes one of each step for itself."""
    per_step = config.max_num_batched_tokens - config.num_seats
    return cdiv(num_tokens, per_step) - 1 if per_step > 0 else _ALWAYS
