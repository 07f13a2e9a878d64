"""Routes that describe the served model and use its tokenizer: /v1/models, /tokenize and others.

`rollout.serve.app` registers `model_routes`. `rollout.serve.openai.chat` renders conversations by
`chat_ids`. All functions only read the state.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from rollout.serve.errors import ApiError
from rollout.serve.openai.chat_template import ChatTemplate
from rollout.serve.responses import json_response
from rollout.serve.schemas import ChatBody, DetokenizeBody, TokenizeBody
from rollout.serve.state import STATE, Route, ServerState, get_route
from rollout.text import HFTokenizer


def model_routes() -> list[Route]:
    return [
        get_route("/v1/models", _list_models, "The models"),
        get_route("/v1/models/{name:.+}", _get_model, "One model"),
        Route(
            path="/tokenize",
            handler=_tokenize,
            body=TokenizeBody,
            summary="Ids of a text or a conversation",
        ),
        Route(
            path="/detokenize",
            handler=_detokenize,
            body=DetokenizeBody,
            summary="The text of ids",
        ),
        get_route("/tokenizer_info", _tokenizer_info, "Special tokens and the chat template"),
    ]


async def _list_models(request: web.Request, body: Any) -> web.Response:
    return json_response({"object": "list", "data": [_model(request.app[STATE])]})


async def _get_model(request: web.Request, body: Any) -> web.Response:
    state = request.app[STATE]
    state.require_model(request.match_info["name"])
    return json_response(_model(state))


def _model(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.served_name,
        "object": "model",
        "created": state.created,
        "owned_by": "rollout",
        "root": state.llm.model_directory or state.served_name,
        "parent": None,
        "max_model_len": state.max_model_len,
    }


async def _tokenize(request: web.Request, body: TokenizeBody) -> web.Response:
    state = request.app[STATE]
    state.require_model(body.model)
    if body.messages is not None:
        ids = await chat_ids(state, body, max_tokens=None)
    elif body.prompt is not None:
        with_special = body.add_special_tokens is not False
        (ids,) = await state.texts.encode([body.prompt], add_special_tokens=with_special)
    else:
        raise ApiError(400, "give a prompt or messages", param="prompt")
    return json_response(
        {
            "count": len(ids),
            "max_model_len": state.max_model_len,
            "tokens": ids,
            "token_strs": await state.texts.tokens_of(ids) if body.return_token_strs else None,
        }
    )


async def chat_ids(
    state: ServerState, body: ChatBody | TokenizeBody, *, max_tokens: int | None
) -> list[int]:
    """Render a conversation by the chat template and return its token ids. `max_tokens` is the
    limit of TokenTexts.encode. Raises ApiError, also for fields that the template does not read."""
    if not body.messages:
        raise ApiError(400, "messages is empty; give at least one", param="messages")
    if state.template is None and body.chat_template is None:
        raise ApiError(
            400,
            "the model has no chat template; start the server with chat_template, or POST "
            "/v1/completions",
        )
    if body.chat_template is not None and not state.config.trust_request_chat_template:
        raise ApiError(
            400,
            "chat_template of a request needs a server with trust_request_chat_template=True",
            param="chat_template",
        )
    template = state.template or ChatTemplate(state.llm.tokenizer)
    if body.documents or body.reasoning_effort is not None:
        _check_template_reads(body, template.source_for(body.tools, body.chat_template))
    text = template.render(
        body.messages,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        template=body.chat_template,
        variables=_template_variables(body),
    )
    # The template writes special tokens itself.
    (ids,) = await state.texts.encode(
        [text], add_special_tokens=bool(body.add_special_tokens), max_tokens=max_tokens
    )
    return ids


def _check_template_reads(body: ChatBody | TokenizeBody, source: str) -> None:
    if body.documents and "documents" not in source:
        raise ApiError(
            400,
            "documents are not read by the chat template; write them into messages",
            param="documents",
        )
    effort = body.reasoning_effort
    is_read = "reasoning_effort" in source or "enable_thinking" in source
    if effort is not None and effort != "none" and not is_read:
        raise ApiError(
            400,
            f"reasoning_effort={effort!r} is not read by the chat template; leave it out",
            param="reasoning_effort",
        )


def _template_variables(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """Return the template's variables besides messages and tools, under vLLM's names."""
    variables: dict[str, Any] = {}
    if body.documents is not None:
        variables["documents"] = body.documents
    if (effort := body.reasoning_effort) is not None:
        variables |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    thinking = (body.chat_template_kwargs or {}).get("enable_thinking")
    variables = {**(body.chat_template_kwargs or {}), **variables}
    return variables if thinking is None else {**variables, "enable_thinking": thinking}


async def _detokenize(request: web.Request, body: DetokenizeBody) -> web.Response:
    state = request.app[STATE]
    state.require_model(body.model)
    return json_response({"prompt": await state.texts.decode(body.tokens)})


async def _tokenizer_info(request: web.Request, body: Any) -> web.Response:
    state = request.app[STATE]
    tokenizer, template = state.texts.tokenizer, state.template
    special = {}
    if isinstance(tokenizer, HFTokenizer):
        special = ChatTemplate(tokenizer).special_tokens
    for name, token_id in (("eos_token", tokenizer.eos_id), ("bos_token", tokenizer.bos_id)):
        if token_id is not None:
            special.setdefault(name, state.texts.of(token_id))
    return json_response(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "eos_token": special.get("eos_token"),
            "bos_token": special.get("bos_token"),
            "pad_token": special.get("pad_token", special.get("eos_token")),
            "unk_token": special.get("unk_token"),
            "chat_template": None if template is None else template.source,
            "vocab_size": tokenizer.vocab_size,
            "max_model_len": state.max_model_len,
        }
    )
