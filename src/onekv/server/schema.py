"""Requests and responses of the API: types, limits and names. What a request asks for and cannot have is refused here, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_LOGPROBS: Final = 20
_MAX_ID: Final = 2**31 - 1

_SEVERAL: Final = Field(min_length=1, max_length=256)

TokenId = Annotated[int, Field(ge=0, le=_MAX_ID)]
Ids = Annotated[list[TokenId], Field(min_length=1)]
Words = Annotated[str, Field(min_length=1)]
FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


def unsupported(why: str, *neutral: object) -> BeforeValidator:
    """A field that OpenAI's API has and this server has not. Null, and values that ask for nothing, may be sent."""

    def check(value: object) -> None:
        if value is not None and not any(type(value) is type(one) and value == one for one in neutral):
            raise PydanticCustomError("unsupported_parameter", "not supported here: {why}", {"why": why})

    return BeforeValidator(check)


def wrong(field: str, message: str) -> PydanticCustomError:
    """An error about a field that is found where several are compared."""
    return PydanticCustomError("invalid_value", message.replace("{", "{{").replace("}", "}}"), {"field": field})


class Body(BaseModel):
    """A request: no type is converted, no field is ignored."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


# --- messages -------------------------------------------------------------------------------------------------------------------


def _text_only(value: object) -> object:
    if isinstance(value, str) and value != "text":
        raise PydanticCustomError("unsupported_parameter", "not supported here: parts other than text")
    return value


class TextPart(Body):
    """A piece of a message's text."""

    type: Annotated[Literal["text"], BeforeValidator(_text_only)]
    text: str


Content = str | Annotated[list[TextPart], Field(min_length=1)]
_NAMES = "names of participants are not shown to the model"


class Instruction(Body):
    """What the system or the developer says; both are the template's "system"."""

    role: Literal["system", "developer"]
    content: Content
    name: Annotated[None, unsupported(_NAMES)] = None


class Question(Body):
    """What the user says."""

    role: Literal["user"]
    content: Content
    name: Annotated[None, unsupported(_NAMES)] = None


class CalledFunction(Body):
    """A call's name and its arguments, JSON."""

    name: Words
    arguments: str


class Call(Body):
    """A call the model made earlier."""

    id: Words
    type: Literal["function"]
    function: CalledFunction


class Reply(Body):
    """What the model said earlier."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[Call], Field(min_length=1)] | None = None
    name: Annotated[None, unsupported(_NAMES)] = None
    refusal: Annotated[None, unsupported("a refusal is text like any other; send it as content")] = None
    audio: Annotated[None, unsupported("models here know text only")] = None
    function_call: Annotated[None, unsupported("use tool_calls")] = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and self.tool_calls is None:
            raise ValueError("an assistant's message needs content or tool_calls")
        return self


class ToolResult(Body):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Words


Message = Annotated[Instruction | Question | Reply | ToolResult, Field(discriminator="role")]
Messages = Annotated[list[Message], Field(min_length=1)]


# --- tools and formats ----------------------------------------------------------------------------------------------------------


class Function(Body):
    """A function the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] = {}
    strict: bool | None = None


class Tool(Body):
    """One tool."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """Which function."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class Schema(Body):
    """A JSON schema. An answer always keeps to it, `strict` or not."""

    model_config = ConfigDict(serialize_by_alias=True)
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class SchemaFormat(Body):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: Schema


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class StreamOptions(Body):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[None, unsupported("chunks are not padded", False)] = None


# --- requests -------------------------------------------------------------------------------------------------------------------


class Generation(Body):
    """What both kinds of completion take. The names above the line are OpenAI's, those below it vLLM's and ours."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stop: Words | Annotated[list[Words], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[None, unsupported("requests are not told apart by user; cache_salt keeps users' prefixes apart")] = None
    # ---
    top_k: Annotated[int, Field(ge=-1, le=_MAX_ID)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    session: Words | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", 'only of use with "stream": true')
        if self.session is not None and self.n > 1:
            raise wrong("n", "a session goes on in one way; leave n out, or fork the session")
        if self.session is not None and self.cache_salt is not None:
            raise wrong("cache_salt", "a session has the salt it was made with")
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer."""
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: (
        Words
        | Ids
        | Annotated[list[Words], Field(min_length=1, max_length=256)]
        | Annotated[list[Ids], Field(min_length=1, max_length=256)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: Annotated[None, unsupported("the models here continue a text, they do not fill a gap", "")] = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, one or several."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[one for one in self.prompt if isinstance(one, int)]]
        return [one for one in self.prompt if not isinstance(one, int)]

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.max_tokens == 0 and not (self.echo and self.logprobs is not None):
            raise wrong("max_tokens", "0 is only of use with echo and logprobs, to score the prompt")
        if self.best_of is not None and self.best_of != self.n:
            raise PydanticCustomError(
                "unsupported_parameter", "not supported here unless it equals n: all answers are given back", {"field": "best_of"}
            )
        if self.session is not None and len(self.prompts) > 1:
            raise wrong("prompt", "a session goes on with one prompt")
        if self.session is not None and self.echo:
            raise wrong("echo", "a session's text is not given back; leave echo out")
        return self


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Annotated[None, unsupported("how many tools the model calls is up to it", True)] = None
    functions: Annotated[None, unsupported("use tools")] = None
    function_call: Annotated[None, unsupported("use tool_choice")] = None
    modalities: Annotated[None, unsupported("models here know text only", ["text"])] = None
    audio: Annotated[None, unsupported("models here know text only")] = None
    prediction: Annotated[None, unsupported("an answer is not predicted by its client")] = None
    reasoning_effort: Annotated[None, unsupported("how long a model thinks is up to its template")] = None
    verbosity: Annotated[None, unsupported("say it in the messages")] = None
    service_tier: Annotated[None, unsupported("there is one tier", "auto", "default")] = None
    store: Annotated[None, unsupported("answers are not stored; use a session", False)] = None
    metadata: Annotated[None, unsupported("answers are not stored")] = None
    web_search_options: Annotated[None, unsupported("there is no search")] = None
    moderation: Annotated[None, unsupported("nothing is moderated")] = None
    prompt_cache_key: Annotated[None, unsupported("prefixes are found by their tokens; cache_salt keeps them apart")] = None
    prompt_cache_options: Annotated[None, unsupported("prefixes are found by their tokens, and stay until their cells are needed")] = None
    prompt_cache_retention: Annotated[None, unsupported("prefixes stay until their cells are needed")] = None
    safety_identifier: Annotated[None, unsupported("requests are not told apart by user")] = None

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.max_tokens == 0:
            raise wrong("max_tokens", "must be at least 1")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise wrong("max_tokens", f"is {self.max_tokens} and max_completion_tokens {self.max_completion_tokens}; send one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs", 'only of use with "logprobs": true')
        if self.tools is None and self.tool_choice not in (None, "none"):
            raise wrong("tool_choice", "there are no tools to choose from")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise wrong("tools", "two tools have one name")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise wrong("tool_choice", f"there is no tool {self.tool_choice.function.name!r}")
        if self.uses_tools and self.response_format is not None and self.response_format.type != "text":
            raise wrong("response_format", "an answer that may call a tool has no other format; leave tools out")
        return self

    @property
    def uses_tools(self) -> bool:
        """Whether the model is shown the tools."""
        return self.tools is not None and self.tool_choice != "none"


class EmbeddingRequest(Body):
    """POST /v1/embeddings."""

    model: str | None = None
    input: Words | Ids | Annotated[list[Words], _SEVERAL] | Annotated[list[Ids], _SEVERAL]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: Annotated[None, unsupported("requests are not told apart by user")] = None


class TokenizeRequest(Body):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128)] | None = None
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "send either prompt or messages")
        if self.tools is not None and self.messages is None:
            raise wrong("tools", "only of use with messages")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


# --- sessions -------------------------------------------------------------------------------------------------------------------


class NewSession(Body):
    """POST /v1/sessions."""

    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class Place(Body):
    """POST /v1/sessions/{id}/fork: up to a message, that one included, or up to a position; neither: all."""

    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    message: Annotated[int, Field(ge=0)] | None = None
    position: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _one_at_most(self) -> Self:
        if None not in (self.message, self.position):
            raise wrong("position", "send either message or position")
        return self


class Rewind(Body):
    """POST /v1/sessions/{id}/rewind: take back the last messages, or everything from a position on."""

    messages: Annotated[int, Field(ge=1)] | None = None
    position: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.messages is None) == (self.position is None):
            raise wrong("messages", "send either messages or position")
        return self


class Edit(Body):
    """POST /v1/sessions/{id}/edit: remove a message, or the positions from start up to end."""

    message: Annotated[int, Field(ge=0)] | None = None
    start: Annotated[int, Field(ge=0)] | None = None
    end: Annotated[int, Field(ge=0)] | None = None
    mode: Literal["exact", "shift"] = "exact"

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.start is None) != (self.end is None) or (self.message is None) == (self.start is None):
            raise wrong("message", "send either message, or start and end")
        return self


# --- responses ------------------------------------------------------------------------------------------------------------------


class PromptDetails(BaseModel):
    """Of the prompt's tokens, how many had their keys and values already."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CompletionLogprobs(BaseModel):
    """Per token: its text, its log-probability, the likeliest ones (and its own), and where its text starts."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TokenProbability(BaseModel):
    """One token a model might have chosen."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenProbability(TokenProbability):
    """The token it chose, and the likeliest ones."""

    top_logprobs: list[TokenProbability]


class ChatLogprobs(BaseModel):
    """One entry a generated token."""

    content: list[ChosenProbability]
    refusal: None = None


class CompletionChoice(BaseModel):
    """One continuation, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class MadeCall(BaseModel):
    """A call the model makes; `index` in streams."""

    index: int | None = None
    id: str
    type: Literal["function"]
    function: CalledFunction


class ReplyMessage(BaseModel):
    """What the model says; in streams, what is new of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    tool_calls: list[MadeCall] | None = None


class ChatChoice(BaseModel):
    """One answer (`message`) or a piece of it (`delta`)."""

    index: int
    message: ReplyMessage | None = None
    delta: ReplyMessage | None = None
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class Completion(BaseModel):
    """Answers to a request, or a chunk of a stream of them."""

    id: str
    object: Literal["text_completion", "chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[CompletionChoice] | list[ChatChoice]
    usage: Usage | None = None
    explain: dict[str, Any] | list[dict[str, Any]] | None = None


class ErrorFields(BaseModel):
    """What was wrong: in words, in kind, the field, and what a program may act on."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is an error."""

    error: ErrorFields
