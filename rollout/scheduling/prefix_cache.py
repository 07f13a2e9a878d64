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
        key_version = version if self.is_isolated else ANY_VERSION
        keys = (self._key(sequence, position, key_version) for position in range(num_blocks))
        entries = self._blocks.find_prefix(keys, self._oldest(version))
        sequence.blocks = self._blocks.pin(entries)
        for entry in entries:
            sequence.note_shared(entry.spans)
        sequence.num_indexed_blocks = sequence.num_shared_blocks = len(entries)

    def index_written(self, sequence: Sequence, version: int) -> None:
        """Index the sequence's blocks that have become full since the last call, under `version`
        of the weights.
        """
        if not sequence.is_indexable:
            return
        block_size = self._blocks.block_size
        while (sequence.num_indexed_blocks + 1) * block_size <= len(sequence.kv_spans):
            if not self._index_next(sequence, version):
                sequence.is_indexable = False
                return

    def _index_next(self, sequence: Sequence, version: int) -> bool:
        position, block_size = sequence.num_indexed_blocks, self._blocks.block_size
        spans = sequence.kv_spans.slice(position * block_size, (position + 1) * block_size)
        key_version = ANY_VERSION
        if self.is_isolated:
            key_version = sequence.kv_spans.version_at(0)
            if spans.min() != key_version or spans.sum() != key_version * block_size:
                return False
        key = self._key(sequence, position, key_version)
        if not self._blocks.index(sequence.blocks, position, key, spans, self._oldest(version)):
            return False
        sequence.num_indexed_blocks += 1
        return True

    def _oldest(self, version: int) -> int | None:
        """The oldest version whose KV may be reused under `version`."""
        return None if self._max_age is None else version - self._max_age

    def _key(self, sequence: Sequence, position: int, key_version: int) -> bytes:
        """The key of the sequence's block `position`; each is computed once."""
        if sequence.prefix_key_version != key_version:
            sequence.prefix_keys, sequence.prefix_key_version = [], key_version
        keys, block_size = sequence.prefix_keys, self._blocks.block_size
        while len(keys) <= position:
            start = len(keys) * block_size
            parent = keys[-1] if keys else ROOT_KEY
            keys.append(block_key(parent, key_version, sequence.tokens[start : start + block_size]))
        return keys[position]
