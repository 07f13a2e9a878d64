"""TokenTree: each row's path, who attends to whom, and which rows share a tree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer_hooks.update.token_tree import (
    TokenTree,
    common_prefix,
    contiguous_parts,
    split_into_trees,
)

# Few token ids, so that rows share prefixes.
row_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)


@given(row_lists)
def test_a_token_tree_spells_each_row_and_holds_each_prefix_once(rows: list[list[int]]) -> None:
    tree = TokenTree.of(rows)
    prefixes = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    assert len(tree) == len(prefixes)
    for row, nodes_T in zip(rows, tree.nodes_BT, strict=True):
        nodes = nodes_T[: len(row)]
        assert tree.tokens_N[nodes].tolist() == row
        assert tree.depths_N[nodes].tolist() == list(range(len(row)))
        assert nodes_T[len(row) :].eq(-1).all()


@given(row_lists)
def test_a_node_attends_to_itself_and_to_what_comes_before_it_in_its_rows(
    rows: list[list[int]],
) -> None:
    tree = TokenTree.of(rows)
    wanted = {
        (int(query), int(key))
        for row, nodes_T in zip(rows, tree.nodes_BT, strict=True)
        for position, query in enumerate(nodes_T[: len(row)])
        for key in nodes_T[: position + 1]
    }
    assert set(map(tuple, tree.attention_mask().nonzero().tolist())) == wanted


@given(row_lists, st.one_of(st.none(), st.integers(1, 20)), st.floats(0.0, 1.0))
def test_split_into_trees_keeps_every_row_and_the_bound(
    rows: list[list[int]], max_nodes: int | None, pair_cost: float
) -> None:
    trees = split_into_trees(rows, max_nodes, pair_cost)
    assert sorted(index for tree in trees for index in tree) == list(range(len(rows)))
    for tree in trees:
        num_nodes = len(TokenTree.of([rows[index] for index in tree]))
        assert max_nodes is None or num_nodes <= max_nodes or len(tree) == 1


@given(row_lists, st.floats(0.0, 1.0))
def test_split_into_trees_costs_no_more_than_a_tree_for_each_row(
    rows: list[list[int]], pair_cost: float
) -> None:
    def cost(tree: list[int]) -> float:
        num_nodes = len(TokenTree.of([rows[index] for index in tree]))
        return num_nodes + pair_cost * num_nodes**2

    apart = sum(cost([index]) for index in range(len(rows)))
    assert sum(map(cost, split_into_trees(rows, None, pair_cost))) <= apart + 1e-9


def test_rows_without_a_common_prefix_are_one_tree_only_where_pairs_cost_nothing() -> None:
    rows = [[1, 2, 3], [4, 5, 6]]
    assert len(split_into_trees(rows, None, 0.0)) == 1
    assert len(split_into_trees(rows, None, 0.01)) == 2


@given(*[st.lists(st.integers(0, 1), max_size=5)] * 2)
def test_common_prefix_is_the_longest_that_both_begin_with(
    first: list[int], second: list[int]
) -> None:
    length = common_prefix(first, second)
    assert first[:length] == second[:length]
    assert first[: length + 1] != second[: length + 1] or length in (len(first), len(second))


@given(row_lists, st.integers(1, 5))
def test_contiguous_parts_hold_every_row_in_sorted_order(
    rows: list[list[int]], num_parts: int
) -> None:
    parts = contiguous_parts(rows, num_parts)
    assert len(parts) == num_parts
    order = [index for part in parts for index in part]
    assert sorted(order) == list(range(len(rows)))
    assert [rows[index] for index in order] == sorted(rows)


def test_contiguous_parts_of_two_groups_are_the_groups() -> None:
    first = [[1, 2, 3, 4, 5, 6, 7, tail] for tail in range(4)]
    second = [[9, 2, 3, 4, 5, 6, 7, tail] for tail in range(4)]
    assert contiguous_parts([*first, *second], 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
