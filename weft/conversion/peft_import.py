"""Import adapters of PEFT, to train them further: ``lora.path``, ``weft import``.

The inverse of `weft.conversion.peft_export`, whose docstring explains the formats.  The names of
the tensors say which layers have adapters.  A module of transformers may hold several of weft's
layers.  Then each of these gets the A of the module and its own rows of B, so both models compute
the same.  If B is block-diagonal, as in weft's exports, each layer gets only its part of A.

A file may also have weights of the base model, of ``modules_to_save`` or of adapted embeddings.
They take the place of the base model's.  Embedding and head are trained further if
``modules_to_save`` names them; other weights are frozen.  Rows of ``trainable_token_indices``
become changes of the base model's rows.

Nothing is written here, and every error is reported before a weight is imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.checkpoint.safetensors import NAMES
from weft.checkpoint.safetensors_reader import read_file_contents
from weft.checkpoint.shard_files import Contents
from weft.checkpoint.weight_files import Weight, open_weight
from weft.config.errors import ConfigErrors
from weft.config.schema import LoraSection
from weft.config.storage import CorruptData
from weft.conversion.hf_convert import DTYPES, path_exists
from weft.conversion.hf_weights import list_hf_tensors
from weft.conversion.peft_config import CONFIG, PeftConfig, read_peft_config
from weft.conversion.peft_export import (
    PREFIX,
    ROWS,
    ROWS_SUFFIX,
    WEIGHTS,
    Target,
    column_lengths,
    merge_adapters,
    row_lengths,
)
from weft.conversion.peft_pairs import Pair, list_places, read_tensor
from weft.inference.inference_model import is_mtp_weight
from weft.models.family import Family
from weft.models.hf_mapping import get_hf_mapping, param_shapes, printable
from weft.planning.lora_plan import TABLES, row_tables
from weft.planning.matrices import list_matrices
from weft.planning.vocabulary import round_rows

KINDS = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".lora_embedding_A": "embedding_A",
    ".lora_embedding_B": "embedding_B",
    ROWS_SUFFIX: "rows",
}
# PEFT stores a module that it trains in full, or whose vocabulary was resized, under several names.
COPIES = (".token_adapter.base_layer.", ".base_layer.", ".modules_to_save.")
UNUSED = ".original_module."
MAX_PROBLEMS = 5
MIX_REMEDY = "use the adapter with the model it was trained for"


class Adapter(NamedTuple):
    """Adapters of a file, whose shapes fit the model.

    Attributes:
        section: the keys of the section ``[lora]`` that they decide.
        weights: A and B by weft's name.
        lengths: DoRA's magnitudes of rows (of an embedding, columns) by weft's module.
        saved: weights that replace the base model's, by weft's name.
        saved_names: their names in the file, with weft's names.
        tables: embedding and head that are trained further in full.
        rows: rows of trained tokens, by weft's module.
        token_ids: the tokens, ascending as the rows.
    """

    section: dict[str, Any]
    weights: dict[str, Weight]
    lengths: dict[str, Weight]
    saved: dict[str, Weight]
    saved_names: dict[str, str]
    tables: tuple[str, ...] = ()
    rows: Mapping[str, Weight] = MappingProxyType({})
    token_ids: tuple[int, ...] = ()

    def lora_section(self, path: str = "", given: LoraSection | None = None) -> LoraSection:
        """Return the section ``[lora]`` of a run that trains the adapter.

        Args:
            path: the value of ``lora.path``.
            given: tables and tokens that the run trains, too.
        """
        given = given or LoraSection()
        tables = dict.fromkeys((*self.tables, *given.modules_to_save))
        fields = {"path": path, **self.section, "modules_to_save": tuple(tables)}
        ids = tuple(sorted({*self.token_ids, *given.token_ids}))
        return LoraSection.model_validate(fields | {"trainable_tokens": ids or "auto"})

    def apply(
        self, base: Mapping[str, Weight], lora: LoraSection, family: Family, config: Any
    ) -> dict[str, Weight]:
        """Return the weights of a run that trains the adapters.

        Args:
            base: weights of the base model, by weft's name.
            lora: the section ``[lora]`` of the run.
            family: the model family.
            config: its configuration.
        """
        weights = {**base, **self.saved}
        frozen = merge_adapters(weights, {}, lora, family, config)
        changes = {
            f"{name}.lora_magnitude.weight": Weight(
                lengths.shape, partial(_read_change, lengths, frozen[f"{name}.weight"], name)
            )
            for name, lengths in self.lengths.items()
        }
        for table in (each.name for each in row_tables(config, lora)):
            size = torch.Size((len(lora.token_ids), weights[f"{table}.weight"].shape[1]))
            read = partial(self._read_rows, table, frozen[f"{table}.weight"], lora.token_ids)
            changes[f"{table}{ROWS}"] = Weight(size, read)
        return weights | self.weights | changes

    def _read_rows(self, table: str, frozen: Weight, ids: Sequence[int]) -> Iterator[Tensor]:
        """Yield the changes of rows: zeros for tokens that the adapter does not train."""
        known = {}
        if table in self.rows:
            known = dict(zip(self.token_ids, torch.cat([*self.rows[table].read()]), strict=True))
        change_ND = torch.zeros(len(ids), frozen.shape[1])
        first = 0
        for rows in frozen.read():
            for i, token in enumerate(ids):
                if token in known and first <= token < first + len(rows):
                    change_ND[i] = known[token].float() - rows[token - first].float()
            first += len(rows)
        yield change_ND


def _read_change(lengths: Weight, weight: Weight, name: str) -> Iterator[Tensor]:
    """Yield what weft trains: see `weft.parallel.lora.dora`."""
    measure = column_lengths if name == "embed_tokens" else row_lengths
    yield torch.cat([*lengths.read()]).float() - measure(weight)


def open_adapter(
    directory: Path, family: Family, config: Any, errors: ConfigErrors
) -> Adapter | None:
    """Open the adapter in a directory; on an error append it and return None.

    Args:
        directory: has ``adapter_config.json`` and ``adapter_model.safetensors``.
        family: the family of the base model.
        config: its configuration.
        errors: receives every reason why the adapter cannot be imported.
    """
    found = ConfigErrors()
    peft = read_peft_config(directory, found)
    contents = _read_contents(directory, found)
    if family.hf_mapping is None:
        found.add("model.kind", "has no counterpart in transformers that PEFT could adapt")
    result = None
    if peft is not None and contents is not None and not found:
        result = _Reader(contents, peft, family, config, found).read()
    errors += found[:MAX_PROBLEMS]
    if len(found) > MAX_PROBLEMS:
        errors.add(WEIGHTS, f"has {len(found) - MAX_PROBLEMS} more problems")
    return None if found else result


def _read_contents(directory: Path, errors: ConfigErrors) -> Contents | None:
    """Return the tensors of the file, which are all in a known dtype."""
    path = directory / WEIGHTS
    pickle = path.with_suffix(".bin")
    if not path_exists(path) and path_exists(pickle):
        rule = f"does not exist, only the pickle {pickle.name}, which may run code"
        remedy = "if you trust its source, load it with PEFT and call save_pretrained()"
        errors.add(WEIGHTS, rule, remedy)
        return None
    try:
        contents = read_file_contents(path)
    except CorruptData as error:
        errors.add(WEIGHTS, str(error), "download it again")
        return None
    for name, tensor in contents.tensors.items():
        if tensor.dtype not in DTYPES.values():
            rule = f"is {NAMES[tensor.dtype]}, which does not fit in float32"
            errors.add(printable(name), rule, "save it as F32, BF16 or F16")
    return contents


def count_rows(directory: Path) -> int:
    """Return the rows of the embedding or head in an adapter's file; 0 without any."""
    try:
        tensors = read_file_contents(directory / WEIGHTS).tensors
    except CorruptData:  # `open_adapter` reports it
        return 0
    tables = tuple(f"{table}.weight" for table in TABLES)
    return max(
        (each.shape[0] for name, each in tensors.items() if _base_name(name).endswith(tables)),
        default=0,
    )


def _base_name(name: str) -> str:
    """Return transformers' name of a weight of the base model in an adapter."""
    name = name.removeprefix(PREFIX)
    for each in COPIES:
        name = name.replace(each, ".")
    return name


class _Reader:
    """Reads one file for one model."""

    def __init__(
        self,
        contents: Contents,
        peft: PeftConfig,
        family: Family,
        config: Any,
        errors: ConfigErrors,
    ) -> None:
        self.contents, self.peft, self.errors = contents, peft, errors
        self.family, self.config = family, config
        self.mapping = get_hf_mapping(family)
        self.shapes = {
            name: shape
            for name, shape in param_shapes(family, config).items()
            if not is_mtp_weight(name, config)
        }
        self.is_tied = config.tied_embeddings
        self.layers = [
            matrix.name
            for matrix in list_matrices(config, family)
            if f"{matrix.name}.weight" in self.shapes
        ]

    def read(self) -> Adapter | None:
        """Return the adapter; None after an error."""
        groups, others = self._group()
        rows = {path: names.pop("rows") for path, names in groups.items() if "rows" in names}
        groups = {path: names for path, names in groups.items() if names}
        saved = self._saved(others)
        token_rows = self._token_rows(rows)
        embedding = groups.pop(self.mapping.hf_name("embed_tokens"), {})
        tied_head = groups.pop("lm_head", {}) if self.is_tied else {}
        places = list_places(self.mapping, self.layers, self.shapes, self.peft)
        if not self.is_tied:
            places["lm_head"] = Target("lm_head", "", ("lm_head",))
        pairs = []
        for path, names in groups.items():
            if path not in places:
                rule = "is not a layer that weft adapts, or not one of this model"
                self.errors.add(printable(path), rule, MIX_REMEDY)
            elif self._has_all(path, names, ("A", "B")):
                pairs.append(self._pair(places[path], names))
        has_embedding = bool(embedding or tied_head)
        if has_embedding:
            self._check_embedding(embedding, tied_head)
        if not groups and not has_embedding:
            self.errors.add(WEIGHTS, "has no adapters of LoRA", "use another adapter")
        if self.errors:
            return None
        built = self._build([pair for pair in pairs if pair], embedding, saved)
        if built is None:
            return None
        tables = tuple(
            table
            for table in TABLES
            if table in self.peft.modules_to_save and f"{table}.weight" in saved.values()
        )
        ids = sorted({*chain(*self.peft.token_indices.values())}) if token_rows else ()
        return built._replace(tables=tables, rows=token_rows, token_ids=tuple(ids))

    def _token_rows(self, names: Mapping[str, str]) -> dict[str, Weight]:
        """Return the rows of trained tokens by weft's module, ascending by id."""
        rows, indices = {}, self.peft.token_indices
        field = f"{CONFIG} trainable_token_indices"
        if len({frozenset(ids) for ids in indices.values()}) > 1:
            rule, remedy = (
                "names other tokens for the head than for the embedding",
                "train the same",
            )
            self.errors.add(field, rule, remedy)
            return {}
        for path, name in names.items():
            if self.is_tied and path == "lm_head":
                continue  # the same rows as the embedding's
            table = next(
                (t for t in TABLES if self.mapping.hf_name(f"{t}.weight") == f"{path}.weight"), ""
            )
            ids = indices.get(path.rpartition(".")[2], ())
            if f"{table}.weight" not in self.shapes or not ids:
                rule = "has rows of tokens, but is no table of this model"
                rule = rule if ids else f"has rows of tokens that {field} does not name"
                self.errors.add(printable(path), rule, MIX_REMEDY)
                continue
            vocabulary, width = self.shapes[f"{table}.weight"]
            self._check_shape(name, (len(ids), width))
            if max(ids) >= vocabulary:
                rule = f"has a row for token {max(ids)}, but the model has {vocabulary} rows"
                remedy = f"use --model.vocab_size {round_rows(max(ids) + 1, vocabulary)}, or "
                self.errors.add(printable(path), rule, remedy + MIX_REMEDY)
            order = sorted(range(len(ids)), key=ids.__getitem__)
            read = partial(_read_ordered, self.contents, name, order)
            rows[table] = Weight(torch.Size((len(ids), width)), read)
        return rows

    def _group(self) -> tuple[dict[str, dict[str, str]], list[str]]:
        """Return names of tensors by path and kind, and the names of other tensors."""
        groups: dict[str, dict[str, str]] = {}
        others = []
        for name in self.contents.tensors:
            suffix = next((each for each in KINDS if name.endswith(each)), None)
            if suffix is None:
                if UNUSED not in name:
                    others.append(name)
            else:
                path = name.removeprefix(PREFIX).removesuffix(suffix)
                groups.setdefault(path, {})[KINDS[suffix]] = name
        return groups, others

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.contents.tensors[name].shape)

    def _has_all(self, path: str, names: Mapping[str, str], kinds: Sequence[str]) -> bool:
        """Check that an adapter has exactly its tensors."""
        needed = {*kinds, *(["magnitude"] if self.peft.dora else [])}
        for kind in sorted(needed - names.keys()):
            self.errors.add(printable(path), f"has no tensor lora_{kind}", "download it again")
        if names.keys() - needed:
            rule = "has magnitudes (DoRA), but use_dora is false"
            rule = rule if "magnitude" in names else "has adapters of two kinds"
            self.errors.add(printable(path), rule, "download both files again")
        return names.keys() == needed

    def _check_shape(self, name: str, shape: Sequence[int]) -> None:
        if self._shape(name) != tuple(shape):
            rule = f"has shape {list(self._shape(name))}, not {list(shape)}"
            self.errors.add(printable(name), rule, MIX_REMEDY)

    def _pair(self, target: Target, names: dict[str, str]) -> Pair | None:
        """Check the shapes of a target's tensors."""
        sizes = [self.shapes[f"{part}.weight"] for part in target.parts]
        if target.expert is not None:
            sizes = [size[1:] for size in sizes]
        *experts, _, inputs = sizes[0]
        outputs = sum(size[-2] for size in sizes)
        layout = self.mapping.stacked if experts else None
        rank = self.peft.rank_of(f"{target.path}.{target.parameter}".rstrip("."))
        pair = Pair(target, names, sizes, rank, layout, self.contents)
        if pair.is_swapped:
            inputs, outputs = outputs, inputs
        width, count = rank * math.prod(experts), len(self.errors)
        self._check_shape(names["A"], (width, inputs))
        self._check_shape(names["B"], (outputs, width))
        if "magnitude" in names:
            self._check_shape(names["magnitude"], (outputs,))
        return pair if len(self.errors) == count else None

    def _check_embedding(self, embedding: dict[str, str], head: dict[str, str]) -> None:
        """Check the adapter of the embedding, and that a tied head shares it."""
        path = self.mapping.hf_name("embed_tokens")
        if not embedding or (self.is_tied and not head):
            rule = "has an adapter, but its tied " + ("embedding" if head else "head") + " has none"
            remedy = "train the adapter with ensure_weight_tying"
            self.errors.add("lm_head" if head else path, rule, remedy)
            return
        if not self._has_all(path, embedding, ("embedding_A", "embedding_B")):
            return
        vocabulary, width = self.shapes["embed_tokens.weight"]
        rank, count = self.peft.rank_of(path), len(self.errors)
        a, b = embedding["embedding_A"], embedding["embedding_B"]
        self._check_shape(a, (rank, vocabulary))
        self._check_shape(b, (width, rank))
        if "magnitude" in embedding:
            self._check_shape(embedding["magnitude"], (width,))
        if not self.is_tied or not self._has_all("lm_head", head, ("A", "B")):
            return
        self._check_shape(head["A"], (rank, width))
        self._check_shape(head["B"], (vocabulary, rank))
        if len(self.errors) == count and not all(
            read_tensor(self.contents, ours).equal(read_tensor(self.contents, theirs).T)
            for ours, theirs in ((head["A"], b), (head["B"], a))
        ):
            rule = "has another adapter than the embedding, with which it shares its table"
            self.errors.add("lm_head", rule, "train the adapter with ensure_weight_tying")

    def _saved(self, names: Sequence[str]) -> dict[str, str]:
        """Return weft's names of weights of the base model by their name in the file."""
        if not names:
            return {}
        tensors = list_hf_tensors(self.family, self.config)
        saved = {}
        for name in names:
            hf_name = _base_name(name)
            if ".modules_to_save." in name and f"{PREFIX}{hf_name}" in names:
                continue  # a copy
            if self.is_tied and hf_name == "lm_head.weight":  # the same table
                hf_name = self.mapping.hf_name("embed_tokens.weight")
            tensor = tensors.get(hf_name)
            if tensor is None or tensor.kind != "whole":
                rule = "is neither an adapter of LoRA nor a separate weight of the model"
                self.errors.add(printable(name), rule, MIX_REMEDY)
                continue
            self._check_shape(name, tensor.shape)
            saved[name] = tensor.names[0]
        tables = [name for name, ours in saved.items() if ours == "embed_tokens.weight"]
        if self.is_tied and tables and not self.errors:
            remedy = "train the adapter with ensure_weight_tying"
            if len(tables) == 1:  # PEFT trained one use of the table, and left the other
                rule = "replaces only one use of the table that the embedding and the head share"
                self.errors.add(printable(tables[0]), rule, remedy)
            elif not read_tensor(self.contents, tables[0]).equal(
                read_tensor(self.contents, tables[1])
            ):
                rule = "differs from the embedding, with which it shares its table"
                self.errors.add("lm_head", rule, remedy)
        return saved

    def _find_rank(self, pairs: Sequence[Pair], has_embedding: bool) -> int:
        """Return the rank of all adapters; 0 after an error."""
        ranks = {pair.rank for pair in pairs if len(pair.sizes) == 1}
        if has_embedding:
            ranks.add(self.peft.rank_of(self.mapping.hf_name("embed_tokens")))
        if not ranks:  # only layers that hold several: as in weft's exports, or as PEFT trains them
            own = self.peft.rank
            is_split = all(pair.split(own) is not None for pair in pairs)
            ranks = {own} if is_split else {pair.rank for pair in pairs}
        ranks |= {p.rank for p in pairs if len(ranks) == 1 and p.split(min(ranks)) is None}
        if len(ranks) > 1:
            rule = f"gives adapters of several ranks ({', '.join(map(str, sorted(ranks)))})"
            remedy = "train the adapter with one rank"
            self.errors.add(f"{CONFIG} rank_pattern", f"{rule}; those of weft have one", remedy)
            return 0
        return ranks.pop()

    def _build(
        self, pairs: Sequence[Pair], embedding: dict[str, str], saved: dict[str, str]
    ) -> Adapter | None:
        """Return the adapter of valid tensors; None if weft cannot express it."""
        peft, contents = self.peft, self.contents
        rank = self._find_rank(pairs, bool(embedding))
        names = [f"{pair.target.path}.{pair.target.parameter}".rstrip(".") for pair in pairs]
        names += [self.mapping.hf_name("embed_tokens")] if embedding else []
        scalings = [peft.scaling_of(name) for name in names]
        if not all(math.isclose(each, scalings[0], rel_tol=1e-6) for each in scalings):
            rule = "gives adapters of several scales; those of weft have one"
            self.errors.add(f"{CONFIG} alpha_pattern", rule, "train the adapter with one alpha")
        if self.errors:
            return None
        divisor = math.sqrt(rank) if peft.rank_stabilized else rank
        is_usual = math.isclose(peft.alpha / divisor, scalings[0], rel_tol=1e-6)
        weights = self._factors(pairs, rank) | self._embedding_factors(embedding, rank)
        lengths = self._lengths(pairs, rank)
        if "magnitude" in embedding:
            lengths["embed_tokens"] = open_weight(contents, embedding["magnitude"])
        if self.errors:
            return None
        section = {
            "rank": rank,
            "alpha": peft.alpha if is_usual else scalings[0] * divisor,
            "rank_stabilized": peft.rank_stabilized,
            "dora": peft.dora,
            "targets": self._targets(weights),
        }
        replaced = {ours: open_weight(contents, name) for name, ours in saved.items()}
        return Adapter(section, weights, lengths, replaced, saved)

    def _factors(self, pairs: Sequence[Pair], rank: int) -> dict[str, Weight]:
        """Return A and B of the linear layers by weft's name."""
        reads: dict[str, list[partial[Tensor]]] = {}
        # In a file, names of experts are sorted as texts.
        for pair in sorted(pairs, key=lambda pair: pair.target.expert or 0):
            for i, first in (pair.split(rank) or {}).items():
                for which in "AB":
                    name = f"{pair.target.parts[i]}.lora_{which}.weight"
                    read = partial(pair.read_factor, i, first, rank, which)
                    reads.setdefault(name, []).append(read)
        one_each = {p.target.parts[0] for p in pairs if p.target.expert is not None}
        weights = {}
        for name, parts in reads.items():
            layer, _, which = name.removesuffix(".weight").rpartition(".lora_")
            *experts, outputs, inputs = self.shapes[f"{layer}.weight"]
            if len(parts) != (experts[0] if layer in one_each else 1):
                rule = f"has {len(parts)} adapters for {experts[0]} experts"
                self.errors.add(printable(layer), rule, "use an adapter of all experts")
            size = (*experts, *((rank, inputs) if which == "A" else (outputs, rank)))
            weights[name] = Weight(torch.Size(size), partial(_stack, parts, layer in one_each))
        return weights

    def _embedding_factors(self, names: Mapping[str, str], rank: int) -> dict[str, Weight]:
        """Return A and B of the embedding by weft's name; nothing without an adapter."""
        weights = {}
        for which, size in zip(
            "AB" if names else "", self.shapes["embed_tokens.weight"], strict=False
        ):
            read = partial(_read_embedding, self.contents, names[f"embedding_{which}"], which)
            shape = torch.Size((size, rank))
            weights[f"embed_tokens.lora_embedding_{which}.weight"] = Weight(shape, read)
        return weights

    def _lengths(self, pairs: Sequence[Pair], rank: int) -> dict[str, Weight]:
        """Return DoRA's lengths of the rows by weft's layer."""
        lengths = {}
        for pair in pairs:
            ends = [0, *accumulate(size[-2] for size in pair.sizes)]
            for i in (pair.split(rank) or {}) if "magnitude" in pair.names else ():
                first, stop = ends[i : i + 2]
                read = partial(_read_rows, self.contents, pair.names["magnitude"], first, stop)
                lengths[pair.target.parts[i]] = Weight(torch.Size((stop - first,)), read)
        return lengths

    def _targets(self, weights: Mapping[str, Weight]) -> tuple[str, ...]:
        """Return the value of ``lora.targets`` that selects the layers with adapters."""
        adapted = dict.fromkeys(name.rpartition(".lora_")[0] for name in weights)
        layers = [matrix.name for matrix in list_matrices(self.config, self.family)]
        if [*adapted] and {*adapted} == {*layers}:
            return ()
        targets: dict[str, None] = {}
        for name in adapted:
            tail = name.split(".", 2)[-1] if name.startswith("layers.") else name
            ends = [".".join(tail.split(".")[i:]) for i in range(tail.count("."), -1, -1)]
            fits = (
                end
                for end in ends
                if {n for n in layers if f".{n}".endswith(f".{end}")} <= adapted.keys()
            )
            targets[next(fits, name) if name in layers else name] = None
        return tuple(sorted(targets))


def _read_rows(contents: Contents, name: str, first: int, stop: int) -> Iterator[Tensor]:
    yield read_tensor(contents, name)[first:stop]


def _read_ordered(contents: Contents, name: str, order: Sequence[int]) -> Iterator[Tensor]:
    yield read_tensor(contents, name)[order]


def _read_embedding(contents: Contents, name: str, which: str) -> Iterator[Tensor]:
    value = read_tensor(contents, name)
    yield value.T if which == "A" else value


def _stack(reads: Sequence[partial[Tensor]], has_one_each: bool) -> Iterator[Tensor]:
    """Yield the factors of experts as one tensor; of another layer, its factor."""
    values = [read() for read in reads]
    yield torch.stack(values) if has_one_each else values[0]
