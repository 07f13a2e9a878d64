"""Token sequences as trees, in which the common beginning of several rows occurs once.

Used by `trainer_hooks.update.micro_batches`, which divides a batch into trees, and by
`trainer_hooks.update.tree_pass`, which computes the trees. The rollouts of a group share their
prompt, and groups share a system prompt. In a forward pass over a tree, each token attends only to
its ancestors. Such a pass gives a causal model the same hidden states as passes over all rows.

Shape letters: B rows, T positions, N nodes of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTree:
    """The tokens of some rows as nodes. Each shared prefix occurs once, parents before children.

    `tokens_N`, `depths_N`: token id and position of each node, int64.
    `ends_N`: the descendants of node i are the nodes from i + 1 to `ends_N[i]`, exclusive.
    `nodes_BT`: index of the node of each token of a row, -1 after the row's end.
    """

    tokens_N: torch.Tensor
    depths_N: torch.Tensor
    ends_N: torch.Tensor
    nodes_BT: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[list[int]]) -> TokenTree:
        """Build the tree of `rows` of token ids. Nodes are in the order of sorted rows."""
        nodes_BT = torch.full((len(rows), max(map(len, rows), default=0)), -1)
        tokens: list[int] = []
        depths: list[int] = []
        ends: list[int] = []
        path: list[int] = []  # the nodes of the row before
        before: Sequence[int] = ()
        for index in sorted(range(len(rows)), key=lambda index: rows[index]):
            row = rows[index]
            shared = common_prefix(before, row)
            for node in path[shared:]:
                ends[node] = len(tokens)
            new = range(len(tokens), len(tokens) + len(row) - shared)
            path = [*path[:shared], *new]
            tokens.extend(row[shared:])
            depths.extend(range(shared, len(row)))
            ends.extend(0 for _ in new)
            nodes_BT[index, : len(row)] = torch.tensor(path)
            before = row
        for node in path:
            ends[node] = len(tokens)
        return cls(
            tokens_N=torch.tensor(tokens),
            depths_N=torch.tensor(depths),
            ends_N=torch.tensor(ends),
            nodes_BT=nodes_BT,
        )

    def __len__(self) -> int:
        return len(self.tokens_N)

    def attention_mask(self) -> torch.Tensor:
        """Return which nodes each node attends to (itself and its ancestors), bool [N, N]."""
        index_N = torch.arange(len(self))
        query_N1, key_1N = index_N[:, None], index_N[None]
        return (key_1N <= query_N1) & (query_N1 < self.ends_N[None])


def split_into_trees(
    rows: Sequence[list[int]], max_nodes: int | None, pair_cost: float
) -> list[list[int]]:
    """Return the row indices of each tree. Rows join a tree where that lowers the cost.

    A tree of N nodes costs N + `pair_cost` N^2, since attention computes all pairs of nodes. Rows
    that share little are therefore cheaper in separate trees.
    `max_nodes`: limit on a tree of several rows. None sets no limit.
    `pair_cost`: attention's cost of one pair, divided by the linear layers' cost of one token.
    """
    trees: list[list[int]] = []
    num_nodes = 0
    before: Sequence[int] = ()
    for index in sorted(range(len(rows)), key=lambda index: rows[index]):
        row = rows[index]
        num_new = len(row) - common_prefix(before, row)
        joined = num_nodes + num_new
        # A joined tree computes the shared prefix once, but also all pairs of both parts' nodes.
        saved = len(row) - num_new
        extra = joined**2 - num_nodes**2 - len(row) ** 2
        fits = max_nodes is None or joined <= max_nodes
        if trees and fits and pair_cost * extra <= saved:
            trees[-1].append(index)
            num_nodes = joined
        else:
            trees.append([index])
            num_nodes = len(row)
        before = row
    return trees


def contiguous_parts(rows: Sequence[list[int]], num_parts: int) -> list[list[int]]:
    """Return the row indices of `num_parts` parts with about equal numbers of nodes.

    Parts are cut from the sorted rows, so most rows with a common prefix stay together.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    order = sorted(range(len(rows)), key=lambda index: rows[index])
    before: Sequence[int] = ()
    ends: list[int] = []
    for index in order:
        num_new = len(rows[index]) - common_prefix(before, rows[index])
        ends.append((ends[-1] if ends else 0) + num_new)
        before = rows[index]
    for index, end in zip(order, ends, strict=True):
        parts[(end - 1) * num_parts // ends[-1] if end else 0].append(index)
    return parts


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens in the common prefix of `first` and `second`."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))
