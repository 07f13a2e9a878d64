"""PrefixCache: lets requests share computed blocks, and says under which key each may be found."""

from __future__ import annotations

from rollout.blocks.block_manager import BlockManager
from rollout.blocks.prefix_index import ROOT_KEY, block_key
from rollout.scheduling.sequence import Sequence

# The version in every key where blocks may be reused whatever wrote them.
ANY_VERSION = -1


class PrefixCache:
    """Looks up prompts and indexes full blocks, of prompt and generated tokens.

    Under isolation a block is indexed only if it and all before it were written entirely under one
    version, and is found only under that version. With `reuse_across_versions` any full block is,
    unless it holds KV more than `max_age_versions` older than the current weights.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        reuse_across_versions: bool,
        max_age_versions: int | None,
    ) -> None:
        self._blocks = blocks
        self.is_isolated = not reuse_across_versions
        self._max_age = max_age_versions

    def adopt(self, sequence: Sequence, version: int) -> None:
        """Pin the blocks that hold the sequence's first tokens already, and start behind them.

        They end before the block of its last token, whose logits must be computed. A sequence that
        wants its prompt scored needs all logits and takes nothing.
        """
        if sequence.scores_prompt:
            return
        num_blocks = (sequence.num_tokens - 1) // self._blocks.block_size
        oldest = None if self._max_age is None else version - self._max_age
        keys = self._keys(sequence, version if self.is_isolated else ANY_VERSION, num_blocks)
        entries = self._blocks.find_prefix(keys, oldest)
        sequence.blocks = self._blocks.pin(entries)
        for entry in entries:
            sequence.note_shared(entry.spans)
        sequence.indexed_keys = [entry.key for entry in entries]

    def note_written(self, sequence: Sequence) -> None:
        """Index the sequence's blocks that have become full since the last call."""
        if not sequence.is_indexable:
            return
        block_size = self._blocks.block_size
        while (len(sequence.indexed_keys) + 1) * block_size <= len(sequence.kv_spans):
            if not self._index_next(sequence, block_size):
                sequence.is_indexable = False
                return

    def _index_next(self, sequence: Sequence, block_size: int) -> bool:
        position = len(sequence.indexed_keys)
        start, end = position * block_size, (position + 1) * block_size
        spans = sequence.kv_spans.slice(start, end)
        key_version = ANY_VERSION
        if self.is_isolated:
            key_version = sequence.kv_spans.version_at(0)
            if spans.min() != key_version or spans.sum() != key_version * block_size:
                return False
        parent = sequence.indexed_keys[-1] if position else ROOT_KEY
        key = block_key(parent, key_version, sequence.tokens[start:end])
        if not self._blocks.index(sequence.blocks, position, key, spans):
            return False
        sequence.indexed_keys.append(key)
        return True

    def _keys(self, sequence: Sequence, key_version: int, num_blocks: int) -> list[bytes]:
        block_size = self._blocks.block_size
        keys, key = [], ROOT_KEY
        for start in range(0, num_blocks * block_size, block_size):
            key = block_key(key, key_version, sequence.tokens[start : start + block_size])
            keys.append(key)
        return keys
