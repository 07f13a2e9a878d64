"""rollout explain: shows what a config resolves to on this machine, and why.

`rollout.cli.main` calls `run`, which builds an engine in this process and generates nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from rollout.cli.models import (
    CONFIG_HELP,
    CONFIG_KINDS,
    LLM_HINTS,
    MODEL_KINDS,
    make_llm,
    settings_help,
    with_model,
)
from rollout.cli.settings import Parser, UsageError, read_settings
from rollout.config import OWN_ENGINE

if TYPE_CHECKING:  # it imports torch
    from rollout.cli.engine_facts import Fact

_DESCRIBED = ("vllm-server",)  # engines of other packages that implement Engine.describe


def run(words: Sequence[str]) -> int:
    """Build the engine, print its values and release it. Returns 0. `words` are the command's
    arguments. Raises UsageError for wrong arguments."""
    parser = Parser("explain", "Build an engine, and show its blocks, memory, kernels and limits.")
    parser.add_argument(
        "--products", action="store_true", help="the kernel of each matrix product, too"
    )
    parser.epilog = settings_help(CONFIG_HELP)
    kinds = {**MODEL_KINDS, **CONFIG_KINDS}
    given = parser.parse(words, kinds, hints=LLM_HINTS)
    (of_llm,) = read_settings(with_model(given.settings), kinds, hints=LLM_HINTS)
    name = of_llm.get("engine", OWN_ENGINE)
    if name != OWN_ENGINE and name not in _DESCRIBED:
        raise UsageError(f"engine={name} is not described by rollout explain; leave out engine=")
    with make_llm(of_llm) as llm:
        # Imports torch, which takes seconds, so not before the words are checked.
        from rollout.cli.engine_facts import described_facts, facts_of, summary
        from rollout.engine.build import DynamicInferenceEngine

        engine = llm.engine
        assert engine is not None, "no fleet was asked for"
        sentence, sections, products = f"engine={name}", described_facts(engine), list[str]()
        if isinstance(engine, DynamicInferenceEngine):
            build = engine.build
            sentence, sections = summary(build), facts_of(build)
            products = build.backend.ops.explain().splitlines()
    if given.json:
        rows = {title: [asdict(fact) for fact in facts] for title, facts in sections.items()}
        print(json.dumps({**rows, "products": products}))
        return 0
    console = Console()
    console.print(sentence, "", sep="\n", highlight=False)
    for title, facts in sections.items():
        console.print(_table(title, facts), "")
    if given.products:
        console.print("[b]matrix products[/b]")
        console.print("\n".join(products), highlight=False)
    elif products:
        console.print(f"{len(products)} matrix products: --products lists them")
    return 0


def _table(title: str, facts: Sequence[Fact]) -> Table:
    table = Table(title=f"[b]{title}[/b]", title_justify="left", show_header=False, box=None)
    table.add_column(min_width=26)
    table.add_column(min_width=12)
    table.add_column(style="dim")
    for fact in facts:
        table.add_row(fact.name, str(fact.value), fact.why)
    return table
