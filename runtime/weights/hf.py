"""A folder in Hugging Face format as a model: config.json, safetensors in one file or shards, tokenizer.json."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from pathlib import Path
from typing import Any

import safetensors
import tokenizers
import torch

from pagegen.errors import ModelError
from pagegen.runtime.models.config import ModelConfig, token_ids
from pagegen.runtime.tokenizer import Tokenizer

INDEX = "model.safetensors.index.json"
REMEDY = "get the file again"
MAX_HEADER = 100_000_000  # the format's own limit, in bytes
MAX_DIMS = 8
ITEM_SIZES = {"F32": 4, "F16": 2, "BF16": 2}

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class HFModel:
    """A model in a folder. Opening reads every header, so what is missing or cut short shows before serving."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self.folder = folder
        self.name = name or folder.resolve().name
        self._tokenizer_config = read_json(folder / "tokenizer_config.json", required=False)
        self._backend = _read_tokenizer(folder / "tokenizer.json")
        config = ModelConfig.from_hf(read_json(folder / "config.json"))
        self.config = dataclasses.replace(config, eos_token_ids=self._eos_token_ids(config))
        self._shards = self._locate()

    def weights(self) -> dict[str, torch.Tensor]:
        """Every weight in its stored dtype.

        A stored head is left out, with a warning if it differs, when config.json ties it to the embedding.
        """
        by_shard: dict[Path, list[str]] = {}
        for name, shard in self._shards.items():
            by_shard.setdefault(shard, []).append(name)
        weights: dict[str, torch.Tensor] = {}
        for shard, names in by_shard.items():
            try:
                with safetensors.safe_open(shard, framework="pt") as file:
                    weights.update({name: file.get_tensor(name) for name in names})
            except (safetensors.SafetensorError, OSError) as error:
                raise ModelError(f"{shard} cannot be read: {error}; {REMEDY}") from error
        if self.config.tie_word_embeddings and HEAD in weights:
            head = weights.pop(HEAD)
            if not torch.equal(head, weights[EMBEDDING]):
                warnings.warn(
                    f"{self.folder}: config.json ties {HEAD} to the embedding, the stored one differs and is not used",
                    stacklevel=2,
                )
        return weights

    def tokenizer(self) -> Tokenizer:
        """The tokenizer and chat template of the folder. Raises ModelError if tokenizer.json is not there."""
        if self._backend is None:
            raise ModelError(f"{self.folder / 'tokenizer.json'} is missing; only that form of tokenizer is read")
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        texts = {name: text for name in names if (text := self._token_text(name)) is not None}
        return Tokenizer(
            self._backend,
            eos_token_ids=self.config.eos_token_ids,
            prompt_prefix=self._prompt_prefix(self._backend),
            chat_template=self._chat_template(),
            template_tokens=texts,
        )

    def _eos_token_ids(self, config: ModelConfig) -> tuple[int, ...]:
        """The union of what config.json, generation_config.json and the tokenizer call an end."""
        generation = read_json(self.folder / "generation_config.json", required=False)
        ids = [*config.eos_token_ids, *token_ids(generation.get("eos_token_id"), "generation_config.json eos_token_id")]
        text = self._token_text("eos_token")
        token = self._backend.token_to_id(text) if self._backend is not None and text is not None else None
        return tuple(dict.fromkeys([*ids, *([] if token is None else [token])]))

    def _token_text(self, name: str) -> str | None:
        """tokenizer_config.json writes a token as its text or as an object with `content`."""
        value = self._tokenizer_config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        return text if isinstance(text, str) else None

    def _prompt_prefix(self, backend: tokenizers.Tokenizer) -> tuple[int, ...]:
        """The BOS of plain prompts: as `add_bos_token` says, else what the post-processor puts first."""
        stated = self._tokenizer_config.get("add_bos_token")
        bos = self._token_text("bos_token")
        if stated is False:
            return ()
        bos_id: int | None = backend.token_to_id(bos) if bos is not None else None
        if stated is True and bos_id is not None:
            return (bos_id,)
        plain: list[int] = backend.encode("a", add_special_tokens=False).ids
        full: list[int] = backend.encode("a", add_special_tokens=True).ids
        return tuple(full[: full.index(plain[0])]) if plain and plain[0] in full else ()

    def _chat_template(self) -> str | None:
        """chat_template.jinja wins over tokenizer_config.json; of several named ones the `default` is used."""
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return _read_text(path)
        template = self._tokenizer_config.get("chat_template")
        if isinstance(template, list):
            named = [row for row in template if isinstance(row, dict)]
            template = next((row.get("template") for row in named if row.get("name") == "default"), None)
        return template if isinstance(template, str) else None

    def _locate(self) -> dict[str, Path]:
        """Weight name -> shard, complete and of the right shapes. Raises ModelError naming file and tensor."""
        shards = {path: read_header(path) for path in self._shard_paths()}
        located: dict[str, Path] = {}
        for path, header in shards.items():
            for name in header:
                if name in located:
                    raise ModelError(
                        f"{path}: tensor {name[:100]!r} is in {located[name].name} too; remove one of the files"
                    )
                if not name.endswith("rotary_emb.inv_freq"):  # a buffer that old checkpoints saved
                    located[name] = path
        shapes = self.config.weight_shapes()
        for name, path in located.items():
            if name not in shapes and not (name == HEAD and self.config.tie_word_embeddings):
                raise ModelError(f"{path}: tensor {name[:100]!r} has no place in a {self.config.architecture}")
        for name, shape in shapes.items():
            if name not in located:
                raise ModelError(
                    f"{self.folder}: tensor {name[:100]!r} is in none of its {len(shards)} safetensors files; {REMEDY}"
                )
            found = shards[located[name]][name]
            if found != shape:
                raise ModelError(
                    f"{located[name]}: tensor {name[:100]!r} has shape {list(found)}, config.json says {list(shape)}"
                )
        return located

    def _shard_paths(self) -> list[Path]:
        index = self.folder / INDEX
        if index.is_file():
            return self._indexed_shards(index)
        paths = sorted(self.folder.glob("model*.safetensors"))
        if not paths:
            raise ModelError(f"{self.folder} holds no model*.safetensors; convert other formats to safetensors first")
        if len(paths) > 1:
            warnings.warn(f"{index} is missing; all {len(paths)} safetensors files are read", stacklevel=5)
        return paths

    def _indexed_shards(self, index: Path) -> list[Path]:
        """The files that the index names, each there and holding what the index says."""
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index}: weight_map is not a mapping of tensors to files; {REMEDY}")
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or not name or Path(name).name != name:
                raise ModelError(
                    f"{index}: tensor {tensor[:100]!r} is said to be in {name!r}, which is not a plain file name"
                )
            path = self.folder / name
            if not path.is_file():
                raise ModelError(f"{path} is missing, it holds tensor {tensor[:100]!r}; {REMEDY}")
        paths = [self.folder / name for name in sorted(set(weight_map.values()))]
        held = {path.name: read_header(path) for path in paths}
        for tensor, name in weight_map.items():
            if tensor not in held[name]:
                raise ModelError(
                    f"{self.folder / name} lacks tensor {tensor[:100]!r}, which the index says it has; {REMEDY}"
                )
        return paths


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a safetensors file, every one of them inside the file and of a float dtype.

    Raises ModelError naming the file, and the tensor that is cut off or of another dtype. Format: 8 bytes of header
    length, little endian; JSON of name -> dtype, shape, data_offsets; the data.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise ModelError(
                f"{path} is truncated or damaged: a header of {length} bytes in a file of {size}; {REMEDY}"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        rows = {name: (row["dtype"], tuple(row["shape"]), *row["data_offsets"]) for name, row in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} has a damaged header: {type(error).__name__}: {error}"[:500] + f"; {REMEDY}") from error
    for name, row in rows.items():
        dtype, shape = row[0], row[1]
        if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
            raise ModelError(f"{path}: tensor {name[:100]!r} has dtype {dtype!r}; allowed: {', '.join(ITEM_SIZES)}")
        proper = len(row) == 4 and len(shape) <= MAX_DIMS
        if not proper or not all(isinstance(n, int) and 0 <= n < 2**63 for n in (*shape, *row[2:])):
            raise ModelError(
                f"{path} has a damaged header: tensor {name[:100]!r} has no proper shape or place; {REMEDY}"
            )
        begin, end = row[2], row[3]
        if end - begin != math.prod(shape) * ITEM_SIZES[dtype]:
            raise ModelError(f"{path} has a damaged header: tensor {name[:100]!r} has {end - begin} bytes; {REMEDY}")
        if 8 + length + end > size:
            raise ModelError(
                f"{path} is truncated: tensor {name[:100]!r} ends at byte {8 + length + end} of {size}; {REMEDY}"
            )
    return {name: row[1] for name, row in rows.items()}


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """A JSON object; {} for an absent file that is not required. Raises ModelError naming the file."""
    if not required and not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}; {REMEDY}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object; {REMEDY}")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8; {REMEDY}") from error


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer | None:
    if not path.exists():
        return None
    text = _read_text(path)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises nothing more specific
        raise ModelError(f"{path} is not a readable tokenizer: {error}; {REMEDY}") from error
    backend.no_padding()
    backend.no_truncation()
    return backend
