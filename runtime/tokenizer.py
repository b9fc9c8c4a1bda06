"""Text to token ids and back: encoding that cannot be injected into, incremental decoding, chat templates.

Decoding works on bytes: each token has its bytes, a text is their concatenation read as UTF-8 with U+FFFD for what is
invalid. So a text decoded token by token equals the text decoded at once, whatever the split.
"""

from __future__ import annotations

import codecs
import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.sandbox
import tokenizers

from pagegen.errors import ModelError, RequestError

Message = Mapping[str, Any]  # role, content, and whatever else the template reads

_SPACE = "▁"  # SentencePiece's mark for a space
_ESCAPE = "\ufdd0{}\ufdd1"  # noncharacters, never in real text; any that are get escaped too
_ESCAPED = re.compile("\ufdd0(\\d+)\ufdd1")
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A `tokenizers` model with its end tokens and chat template.

    `prompt_prefix` is what every plain prompt begins with (the BOS of models that want one). `template_tokens` are
    the names a chat template may print, such as bos_token. Safe to use from several threads.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: tuple[int, ...],
        prompt_prefix: tuple[int, ...] = (),
        chat_template: str | None = None,
        template_tokens: Mapping[str, str] | None = None,
    ) -> None:
        backend.encode_special_tokens = True  # a control token's text is text
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._special = frozenset(token for token, added in self._added.items() if added.special)
        self._byte_level, self._strips_space = _decoding(backend)
        self._bytes: dict[int, bytes] = {}
        self._chat_template = chat_template
        self._template_tokens = dict(template_tokens or {})
        self.eos_token_ids = eos_token_ids
        self.prompt_prefix = prompt_prefix
        self.vocab_size: int = max([backend.get_vocab_size() - 1, *self._added]) + 1

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text. May be empty.

        Plain: control tokens in the text are ordinary characters, and the model's BOS, if it wants one, stands in
        front once. `special`: the text is trusted (a rendered template), its control tokens count and nothing is added.
        """
        _check_text(text, "prompt")
        if special:
            ids: list[int] = self._trusting.encode(text, add_special_tokens=False).ids
            return ids
        return [*self.prompt_prefix, *self._plain(text)]

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of a sequence from its beginning. Ids without a token have no text."""
        decoder = IncrementalDecoder(self, skip_special=skip_special)
        return "".join([decoder.push(token) for token in token_ids]) + decoder.flush()

    def stream(self, prompt_ids: Sequence[int] = (), *, skip_special: bool = True) -> IncrementalDecoder:
        """A decoder of what follows a prompt."""
        return IncrementalDecoder(self, prompt_ids, skip_special=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token contributes to the text; b"" for ids without a token."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._lookup_bytes(token_id)
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """A token by itself, control tokens included, for logprob tables; half characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether it is a control token."""
        return token_id in self._special

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""
        return self._chat_template is not None

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation.

        Raises RequestError (param `messages`) for messages the template refuses or a model without a template, and
        ModelError for a template that is broken.
        """
        _check_messages(messages)
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, **self._template_tokens
            )
        except jinja2.exceptions.SecurityError as error:
            raise ModelError(f"the model's chat template does what the sandbox forbids: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RequestError(f"messages do not fit the model's chat template: {error}", "messages") from error

    def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation, as encoding the rendered text gives them, but safe against injection.

        Control tokens count only where the template printed them. The text of one inside a message is swapped for a
        placeholder before rendering and put back afterwards into the stretches between the template's own control
        tokens, which are encoded as plain text. The BOS, too, is the template's business: none is added.
        """
        _check_messages(messages)
        swapped: list[str] = []
        escaped = [_map_strings(message, functools.partial(self._escape, swapped)) for message in messages]
        rendered = self.render_chat(escaped, add_generation_prompt)
        if not swapped:
            return self.encode(rendered, special=True)
        ids: list[int] = []
        position = 0
        for match in self._control_tokens.finditer(rendered):
            ids += self._plain(_unescape(swapped, rendered[position : match.start()]))
            ids.append(self._control_id(match))
            position = match.end()
        return ids + self._plain(_unescape(swapped, rendered[position:]))

    @functools.cached_property
    def _trusting(self) -> tokenizers.Tokenizer:
        """A copy that recognises control tokens: the switch is a property of the whole object, not of a call."""
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.encode_special_tokens = False
        return copy

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        if self._chat_template is None:
            raise RequestError("the model has no chat template; send a plain prompt instead of messages", "messages")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            return environment.from_string(self._chat_template)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the model's chat template is broken at line {error.lineno}: {error.message}") from error

    @functools.cached_property
    def _control_tokens(self) -> re.Pattern[str]:
        """Longest first, so that no token hides behind its own prefix; one group a token."""
        patterns = []
        for token in self._control_ids:
            added = self._added[token]
            left, right = r"\s*" if added.lstrip else "", r"\s*" if added.rstrip else ""
            patterns.append(f"({left}{re.escape(added.content)}{right})")
        return re.compile("|".join(patterns) or "(?!)")

    @functools.cached_property
    def _control_ids(self) -> list[int]:
        return sorted(self._special, key=lambda token: -len(self._added[token].content))

    def _control_id(self, match: re.Match[str]) -> int:
        assert match.lastindex is not None  # every alternative is a group
        return self._control_ids[match.lastindex - 1]

    def _escape(self, swapped: list[str], text: str) -> str:
        """Swaps every control token in `text` for a numbered placeholder and remembers what stood there."""
        _check_text(text, "messages")

        def swap(match: re.Match[str]) -> str:
            swapped.append(match[0])
            return _ESCAPE.format(len(swapped) - 1)

        return re.sub(f"\ufdd0|{self._control_tokens.pattern}", swap, text)

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _lookup_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return str(self._added[token_id].content).encode()
        token: str | None = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        if self._byte_level:
            table = byte_alphabet()
            known = all(character in table for character in token)
            return bytes(table[character] for character in token) if known else token.encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


class IncrementalDecoder:
    """Text of a growing sequence: each push returns what became final, half characters wait.

    With `out` the tokens pushed, concat(pushes) + flush() == decode(prompt + out)[len(decode(prompt)):].
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer._strips_space
        self._open = 0  # characters to drop: decode(prompt) already shows its half character as U+FFFD
        tail = b""
        for token in reversed(prompt_ids):  # a half character is at most 3 bytes: the last 4 tell the state
            tail = self._bytes(token) + tail
            if len(tail) >= 4:
                break
        self._text(tail)
        if self._utf8.getstate()[0]:
            self._open = 1

    def push(self, token_id: int) -> str:
        """The text that this token completes, perhaps none."""
        return self._text(self._bytes(token_id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character."""
        return self._text(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        if self._skip_special and self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _text(self, data: bytes, *, final: bool = False) -> str:
        text = self._utf8.decode(data, final)
        if self._at_start and text:  # SentencePiece marks a word's space, the text's first one is its own
            self._at_start = False
            text = text.removeprefix(" ")
        if self._open and text:
            self._open = 0
            text = text[1:]
        return text


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte: printable Latin-1 stands for itself, the rest from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    for offset, byte in enumerate(sorted(set(range(256)) - set(printable))):
        table[chr(0x100 + offset)] = byte
    return table


def _decoding(backend: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """Whether tokens are byte-level, and whether the text loses a leading space. Raises ModelError for other kinds."""
    state: dict[str, Any] = {"type": "none"} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return True, False
    sentencepiece = kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    replaces = all(step["pattern"] == {"String": _SPACE} for step in steps if step["type"] == "Replace")
    if not sentencepiece or not replaces or not kinds & {"Replace", "Metaspace"}:
        raise ModelError(f"tokenizer decoder {sorted(kinds)} is not supported; allowed: byte-level BPE, SentencePiece")
    metaspace = any(step.get("prepend_scheme", "never") != "never" for step in steps)
    return False, metaspace or "Strip" in kinds


def _check_text(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{param} is not valid Unicode at character {error.start}: {error.reason}", param) from None


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise RequestError("messages is empty; send at least one with role and content", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}] is not an object with a role and a content", "messages")


def _map_strings(value: Any, change: Any) -> Any:
    """A copy of a JSON-like value with `change` applied to every string in it, keys apart."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value


def _unescape(swapped: Sequence[str], text: str) -> str:
    return _ESCAPED.sub(lambda match: swapped[int(match[1])], text)


def _tojson(value: Any, indent: int | None = None) -> str:
    """As transformers renders it: no HTML escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
