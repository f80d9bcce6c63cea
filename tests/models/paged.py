"""Feeds token sequences to a model in a given schedule, with launch arguments made by hand."""

from __future__ import annotations

import torch

from octavo.models.layers import kv_layers
from octavo.runtime.kv_pool import KVPool
from octavo.runtime.launch_args import LaunchArgs

BLOCK_SIZE = 4


class PagedRun:
    """Sequences over scattered blocks. `step` feeds the next tokens of some and returns the logits of all fed tokens."""

    def __init__(self, model, config, sequences: list[torch.Tensor]) -> None:
        self.model = model
        self.sequences = sequences
        self.num_computed = [0] * len(sequences)
        widths = [-(-len(tokens) // BLOCK_SIZE) for tokens in sequences]
        order = 1 + torch.randperm(sum(widths), generator=torch.Generator().manual_seed(0))
        self.tables = order.split(widths)
        layers = kv_layers(model, config, next(model.parameters()).dtype)
        self.pool = KVPool(sum(widths) + 1, layers, BLOCK_SIZE)

    def step(self, chunks: list[tuple[int, int]]) -> list[torch.Tensor]:
        """chunks: (sequence, tokens to feed), decodes first; a chunk of one token is a decode."""
        ids, positions, slots, lens, starts = [], [], [], [], [0]
        for sequence, size in chunks:
            at = torch.arange(size) + self.num_computed[sequence]
            ids.append(self.sequences[sequence][at])
            positions.append(at)
            slots.append(self.tables[sequence][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
            self.num_computed[sequence] += size
            lens.append(self.num_computed[sequence])
            starts.append(starts[-1] + size)
        width = -(-max(lens) // BLOCK_SIZE)
        tables = torch.zeros(len(chunks), width, dtype=torch.int32)
        for row, (sequence, _) in enumerate(chunks):
            used = self.tables[sequence][:width]
            tables[row, : len(used)] = used
        sizes = [size for _, size in chunks]
        args = LaunchArgs(
            input_ids=torch.cat(ids),
            positions=torch.cat(positions),
            slot_mapping=torch.cat(slots),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=tables,
            logits_indices=torch.arange(starts[-1]),
            num_decodes=next((i for i, size in enumerate(sizes) if size > 1), len(sizes)),
            max_query_len=max(sizes),
            max_seq_len=max(lens),
        )
        with torch.inference_mode():
            logits = self.model.compute_logits(self.model(args, self.pool)[args.logits_indices])
        return list(logits.split(sizes))
