"""The only owner of K/V memory and of recurrent states.

`LayerSpec` and `Rope` describe one layer as data. `KVStore` holds, for every layer that owns memory, one tensor of keys and one of
values with a row per cell. It knows nothing of positions or sequences: it is told cells and tensors. How a head becomes bytes is
`codecs`' business. `StateBank` holds what recurrent layers keep of each sequence. It knows nothing of cells: it is told sequences and how
many rows of theirs a state has seen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from onekv.codecs import Codec, codecs_of
from onekv.core.window import Window
from onekv.errors import ConfigError

VLayout = Literal["rows", "transposed"]
States = Mapping[int, tuple[Tensor, ...]]  # per recurrent layer, its state tensors


@dataclass(frozen=True, slots=True)
class Rope:
    """How one layer's stored keys are rotated by position, so that a stored key can be moved to another position.

    Attributes:
        inv_freq: angle per position of each rotated pair, radians, [rotary pairs]
        layout:   "half" pairs dim i with i + pairs; "interleaved" pairs 2i with 2i + 1
        offset:   first rotated dim of the head; dims outside [offset, offset + 2 * pairs) are not rotated
        part:     the buffer that holds the rotated vector; DeepSeek's latent attention keeps it where values go
    """

    inv_freq: tuple[float, ...]
    layout: Literal["half", "interleaved"] = "half"
    offset: int = 0
    part: Literal["key", "value"] = "key"

    def __post_init__(self) -> None:
        if any(isinstance(f, str) for f in self.inv_freq):
            raise ConfigError(f"Rope.inv_freq holds angles, got {self.inv_freq!r}")
        object.__setattr__(self, "inv_freq", tuple(float(f) for f in self.inv_freq))
        if not self.inv_freq:
            raise ConfigError("Rope needs at least one frequency; a layer that is not rotated has rope=None")
        if self.layout not in ("half", "interleaved"):
            raise ConfigError(f'Rope layout is "half" or "interleaved", got {self.layout!r}')
        if self.part not in ("key", "value"):
            raise ConfigError(f'Rope part is "key" or "value", got {self.part!r}')
        if self.offset < 0:
            raise ConfigError(f"Rope offset must not be negative, got {self.offset}")

    def __repr__(self) -> str:
        span = f"{self.inv_freq[0]:.4g} to {self.inv_freq[-1]:.4g}"
        return f"Rope({len(self.inv_freq)} pairs from {span}, {self.layout!r}, offset={self.offset}, part={self.part!r})"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One model layer's keys and values, and its recurrent states.

    Attributes:
        num_kv_heads: G; 0, with head_dim 0, for a layer that keeps recurrent states and no cells
        head_dim:     D, width of a key head
        value_dim:    width of a value head; None means head_dim
        window:       which positions a query of this layer sees
        source:       index of the layer whose K/V this one reads; None if it has its own. A reading layer never writes
        rope:         how stored keys turn with position; None if they do not (a shift then moves positions only)
        states:       shapes of the recurrent state tensors this layer keeps of a sequence
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    window: Window = field(default_factory=Window.full)
    source: int | None = None
    rope: Rope | None = None
    states: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        shapes = tuple(tuple(shape) for shape in self.states)
        object.__setattr__(self, "states", shapes)
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for shape in shapes for n in shape):
            raise ConfigError(f"LayerSpec.states must be shapes of positive integers, got {shapes}")
        if shapes and [self.num_kv_heads, self.head_dim, self.value_dim, self.source, self.rope] == [0, 0, None, None, None]:
            return
        for name in ("num_kv_heads", "head_dim", "value_dim"):
            value = getattr(self, name)
            if value is None and name == "value_dim":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"LayerSpec.{name} must be a positive integer, got {value!r}")
        if not isinstance(self.window, Window):
            raise ConfigError(f"LayerSpec.window must be a Window, such as Window.sliding(512), got {self.window!r}")
        if self.rope is not None:
            width = self.head_dim if self.rope.part == "key" else self.v_dim
            if self.rope.offset + 2 * len(self.rope.inv_freq) > width:
                raise ConfigError(
                    f"LayerSpec.rope rotates dims [{self.rope.offset}, {self.rope.offset + 2 * len(self.rope.inv_freq)}), "
                    f"but the {self.rope.part} head has {width}"
                )

    @property
    def has_cells(self) -> bool:
        """Whether the layer attends over cells, its own or another layer's."""
        return self.num_kv_heads != 0

    @property
    def v_dim(self) -> int:
        """Width of a value head."""
        return self.head_dim if self.value_dim is None else self.value_dim


def owning_layers(layers: Sequence[LayerSpec]) -> list[int]:
    """For each layer the layer whose memory it reads: itself, or where its `source` leads; -1 for a layer without cells.

    Raises:
        ConfigError: a source that is not an earlier owning layer, or whose geometry or window differs.
    """
    owner: list[int] = []
    for i, spec in enumerate(layers):
        if spec.source is None:
            owner.append(i if spec.has_cells else -1)
            continue
        if isinstance(spec.source, bool) or not isinstance(spec.source, int) or not 0 <= spec.source < i:
            raise ConfigError(f"layer {i} reads layer {spec.source!r}; the source must be an earlier layer (0 to {i - 1})")
        root = owner[spec.source]
        if root < 0:
            raise ConfigError(f"layer {i} reads layer {spec.source}, which has no cells")
        other = layers[root]
        if (spec.num_kv_heads, spec.head_dim, spec.v_dim) != (other.num_kv_heads, other.head_dim, other.v_dim):
            raise ConfigError(f"layer {i} reads layer {root} but its heads differ: {spec} and {other}")
        if spec.window != other.window:
            raise ConfigError(f"layer {i} reads layer {root} but its window differs: {spec.window} and {other.window}")
        owner.append(root)
    return owner


def layer_groups(layers: Sequence[LayerSpec]) -> tuple[list[Window], list[int]]:
    """The windows of a model's layer groups, the full one first, and for each layer the index of its group; -1 without cells.

    Raises:
        ConfigError: no layer with cells, or a source that cannot be read.
    """
    owner = owning_layers(layers)
    windows = sorted(dict.fromkeys(layers[i].window for i in owner if i >= 0), key=lambda window: not window.is_full)
    if not windows:
        raise ConfigError("a cache needs at least one layer" + (" that attends over cells" if layers else ""))
    return windows, [-1 if i < 0 else windows.index(layers[i].window) for i in owner]


class KVStore:
    """Keys and values of every owning layer, one row per cell.

    Args:
        layers:    one spec per model layer
        num_cells: cells of every layer, or one number per layer
        k_dtype, v_dtype: "float32", "float16", "bfloat16", "q8_0" or "q4_0"
        v_layout:  "rows" keeps a cell's values together; "transposed" keeps one dim of all cells together.
                   Only the strides differ: every method takes and gives the same shapes. Quantised values have rows only.
        hadamard:  rotate heads before they are quantised; None: where they are q4_0

    Attributes:
        k_codec, v_codec: how keys and values are stored
        k_dtype, v_dtype: torch dtype of their memory; uint8 where it is quantised

    Memory is zeroed, so that a cell never written holds no NaN.

    >>> store = KVStore([LayerSpec(num_kv_heads=2, head_dim=4)], num_cells=8)
    >>> store.store(0, torch.tensor([5, 2, 7]), torch.ones(3, 2, 4), torch.zeros(3, 2, 4))
    >>> store.keys(0)[:, 0, 0]
    tensor([0., 0., 1., 0., 0., 1., 0., 1.])
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        num_cells: int | Sequence[int],
        k_dtype: str = "float32",
        v_dtype: str | None = None,
        device: str | torch.device = "cpu",
        v_layout: VLayout = "rows",
        hadamard: bool | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.owner = owning_layers(self.layers)
        self.device = torch.device(device)
        self.k_codec, self.v_codec = codecs_of(k_dtype, v_dtype, hadamard)
        self.k_dtype, self.v_dtype = self.k_codec.dtype, self.v_codec.dtype
        if v_layout not in ("rows", "transposed"):
            raise ConfigError(f'v_layout is "rows" or "transposed", got {v_layout!r}')
        if v_layout == "transposed" and self.v_codec.is_quantised:
            raise ConfigError(
                f'v_layout="transposed" keeps one dim of all cells together, but {self.v_codec.name} values are blocks of 32 dims of one '
                'cell; use v_layout="rows" or a float v_dtype'
            )
        self.v_layout = v_layout
        counts = [num_cells] * len(self.layers) if isinstance(num_cells, int) else list(num_cells)
        self._k: dict[int, Tensor] = {}
        self._v: dict[int, Tensor] = {}
        for i in self.physical:
            spec, cells = self.layers[i], counts[i]
            k_width, v_width = self.k_codec.width(spec.head_dim), self.v_codec.width(spec.v_dim)
            self._k[i] = torch.zeros(cells, spec.num_kv_heads, k_width, dtype=self.k_dtype, device=self.device)
            if v_layout == "rows":
                self._v[i] = torch.zeros(cells, spec.num_kv_heads, v_width, dtype=self.v_dtype, device=self.device)
            else:
                across = torch.zeros(spec.num_kv_heads, v_width, cells, dtype=self.v_dtype, device=self.device)
                self._v[i] = across.permute(2, 0, 1)

    @property
    def physical(self) -> list[int]:
        """The layers that own memory, ascending; each once."""
        return [i for i, owner in enumerate(self.owner) if i == owner]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(t.nbytes for part in (self._k, self._v) for t in part.values())

    def cell_nbytes(self, layers: Sequence[int] | None = None) -> int:
        """Bytes one cell takes over the given physical layers (all by default)."""
        chosen = self.physical if layers is None else layers
        return sum(self._k[i][0].nbytes + self._v[i][0].nbytes for i in chosen)

    def raw_keys(self, layer: int) -> Tensor:
        """Memory of the keys of the layer `layer` reads, [C, G, k_codec.width(D)] of k_dtype. Not a copy."""
        return self._k[self.owner[layer]]

    def raw_values(self, layer: int) -> Tensor:
        """Memory of the values of the layer `layer` reads, [C, G, v_codec.width(Dv)] of v_dtype. Not a copy."""
        return self._v[self.owner[layer]]

    def keys(self, layer: int) -> Tensor:
        """Keys of the layer `layer` reads, [C, G, D] in the stored float dtype. The memory itself, not a copy.

        Raises:
            ConfigError: keys are quantised: `raw_keys` is their memory, `gather` their numbers.
        """
        if self.k_codec.is_quantised:
            raise ConfigError(f"keys stored as {self.k_codec.name} are bytes; raw_keys gives their memory, gather their numbers")
        return self.raw_keys(layer)

    def values(self, layer: int) -> Tensor:
        """Values of the layer `layer` reads, [C, G, Dv] in the stored float dtype. The memory itself, not a copy.

        Raises:
            ConfigError: values are quantised: `raw_values` is their memory, `gather` their numbers.
        """
        if self.v_codec.is_quantised:
            raise ConfigError(f"values stored as {self.v_codec.name} are bytes; raw_values gives their memory, gather their numbers")
        return self.raw_values(layer)

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write the keys and values of T new tokens of one layer into their cells.

        Does not change which sequences may read a cell; only `Cells` does.

        Shapes:
            slots: [T] int64, each in [0, C), no two equal
            k, v:  [T, G, D] and [T, G, Dv], any float dtype; converted or quantised to the store's
        Raises:
            ConfigError: a shape or dtype differs (names the argument, what came, what was expected), or `layer` reads another
                layer's cells and never writes.
        Cost: copies T*G*(D + Dv) elements; does not wait for the device.
        Source: spec 4.9.
        """
        if self.owner[layer] != layer:
            reads = f"reads the cells of layer {self.owner[layer]}" if self.owner[layer] >= 0 else "has no cells"
            raise ConfigError(f"layer {layer} {reads} and never writes")
        spec, rows = self.layers[layer], slots.shape[0]
        for name, came, width in (("k", k, spec.head_dim), ("v", v, spec.v_dim)):
            expected = (rows, spec.num_kv_heads, width)
            if came.shape != expected:
                raise ConfigError(f"layer {layer}: {name} has shape {tuple(came.shape)}, expected [T, G, D] = {list(expected)}")
            if not came.is_floating_point():
                raise ConfigError(f"layer {layer}: {name} must be a float tensor, got {came.dtype}")
        self.write(layer, slots, k, v)

    def gather(self, layer: int, cells: Tensor, unrotate: bool = True) -> tuple[Tensor, Tensor]:
        """Keys [n, G, D] and values [n, G, Dv] of the given cells as float32, in the order of `cells`. A copy.

        unrotate=False leaves out the inverse of the codecs' Hadamard rotation, for whoever rotates queries and outputs instead.
        """
        return self.gather_keys(layer, cells, unrotate), self.gather_values(layer, cells, unrotate)

    def gather_keys(self, layer: int, cells: Tensor, unrotate: bool = True) -> Tensor:
        """As `gather`, keys alone."""
        return self.k_codec.decode(self.raw_keys(layer).index_select(0, cells), self.layers[layer].head_dim, unrotate)

    def gather_values(self, layer: int, cells: Tensor, unrotate: bool = True) -> Tensor:
        """As `gather`, values alone."""
        return self.v_codec.decode(self.raw_values(layer).index_select(0, cells), self.layers[layer].v_dim, unrotate)

    def write(self, layer: int, cells: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> None:
        """Overwrite keys, values or both of the given cells, [n, G, D] and [n, G, Dv] of any float dtype; converted or quantised."""
        self.write_raw(layer, cells, self._encoded(self.k_codec, k), self._encoded(self.v_codec, v))

    def _encoded(self, codec: Codec, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        if x.requires_grad:
            x = x.detach()
        return x if x.dtype == codec.dtype and x.device == self.device else codec.encode(x.to(self.device))

    def write_raw(self, layer: int, cells: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> None:
        """Overwrite the memory of the given cells with what the codecs have encoded, bit for bit."""
        if k is not None:
            self._k[layer].index_copy_(0, cells, k)
        if v is not None:
            self._v[layer].index_copy_(0, cells, v)

    def copy(self, layers: Sequence[int], sources: Tensor, destinations: Tensor) -> None:
        """Copy keys and values from cell to cell, bit for bit, in the given physical layers. Sources and destinations do not overlap."""
        for layer in layers:
            for part in (self._k, self._v):
                part[layer].index_copy_(0, destinations, part[layer].index_select(0, sources))

    def zero(self) -> None:
        """Zero every key and value. Cost: one pass over the memory."""
        for part in (self._k, self._v):
            for tensor in part.values():
                tensor.zero_()


class StateBank:
    """The recurrent states of every sequence, and of some earlier moments of it to go back to.

    A state is known by how many rows of its sequence it has seen; a sequence without rows has none, which means zeros. States are kept
    in float32, whatever dtype a model was loaded in. A kept state is never changed, only replaced, so forks share it.

    Args:
        layers:      one spec per model layer; those without `states` are ignored
        checkpoints: most earlier states kept of a sequence; see `advance`

    >>> bank = StateBank([LayerSpec(0, 0, states=((2,),))], checkpoints=1)
    >>> bank.advance([(0,)], [3], {0: (torch.tensor([[1.0, 2.0]]),)})
    >>> bank.copy(0, 1, 3)
    >>> bank.advance([(0,)], [4], {0: (torch.tensor([[5.0, 6.0]]),)})
    >>> bank.gather(0, [0, 1, 2])
    [tensor([[5., 6.],
            [1., 2.],
            [0., 0.]])]
    >>> bank.kept(0), bank.kept(1)
    ([3, 4], [3])
    """

    def __init__(self, layers: Sequence[LayerSpec], checkpoints: int, device: str | torch.device = "cpu") -> None:
        self.shapes = {i: spec.states for i, spec in enumerate(layers) if spec.states}
        self.checkpoints = checkpoints
        self.device = torch.device(device)
        self._kept: dict[int, list[tuple[int, States]]] = {}  # per sequence (rows seen, state), ascending; the last is where it stands

    def __bool__(self) -> bool:
        """True iff any layer is recurrent."""
        return bool(self.shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of all kept states; one that sequences share counts once."""
        distinct = {id(state): state for kept in self._kept.values() for _, state in kept}
        return sum(tensor.nbytes for state in distinct.values() for tensors in state.values() for tensor in tensors)

    def kept(self, seq: int) -> list[int]:
        """How many rows each kept state of a sequence has seen, ascending."""
        return [count for count, _ in self._kept.get(seq, ())]

    def has(self, seq: int, count: int) -> bool:
        """True iff a sequence can go on after its first `count` rows."""
        return count == 0 or count in self.kept(seq)

    def gather(self, layer: int, seqs: Iterable[int]) -> list[Tensor]:
        """States of one layer where the sequences stand, one tensor [S, ...] per shape. A copy."""
        rows = [kept[-1][1][layer] if (kept := self._kept.get(seq)) else None for seq in seqs]
        return [
            torch.stack([torch.zeros(shape, device=self.device) if row is None else row[part] for row in rows])
            for part, shape in enumerate(self.shapes[layer])
        ]

    def checked(self, layer: int, states: Sequence[Tensor], rows: int) -> tuple[Tensor, ...]:
        """States of one layer as `advance` takes them: float32, on the bank's device. Not a copy where they are that already.

        Raises:
            ConfigError: not one float tensor [rows, ...] per shape.
        """
        expected = [[rows, *shape] for shape in self.shapes.get(layer, ())]
        if not expected or [list(t.shape) for t in states] != expected or not all(t.is_floating_point() for t in states):
            came = [f"{t.dtype} {list(t.shape)}" for t in states]
            raise ConfigError(f"layer {layer}: states are {came}, expected float tensors {expected or 'of no kind: it is not recurrent'}")
        return tuple(t.detach().to(self.device, torch.float32) for t in states)

    def owned(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Copies of states of one sequence, for `put`."""
        return tuple(t.to(self.device, torch.float32, copy=True) for t in tensors)

    def put(self, seq: int, count: int, states: States) -> None:
        """Let a sequence stand after `count` rows, with these states (of one sequence, not copied) and none to go back to."""
        self.truncate(seq, 0)
        if count and states:
            self._kept[seq] = [(count, states)]

    def mark(self) -> Mapping[int, list[tuple[int, States]]]:
        """Where all sequences stand, for `back_to`. Copies no states."""
        return dict(self._kept)

    def back_to(self, mark: Mapping[int, list[tuple[int, States]]]) -> None:
        """Forget everything since `mark`."""
        self._kept = dict(mark)

    def advance(self, sets: Sequence[Sequence[int]], counts: Sequence[int], states: States, *, replace: Collection[int] = ()) -> None:
        """Put the sequences of `sets[s]` where row s of `states` [S, ...] says, after `counts[s]` rows.

        Their present states stay as earlier ones. Where these are too many, the one that follows the one before it most closely goes,
        except the latest: so the ends of long batches stay longest.

        Args:
            replace: sequences whose present state is not to stay
        Cost: one copy of the states.
        """
        fresh = {}
        for s, (seqs, count) in enumerate(zip(sets, counts, strict=True)):
            # A copy, so that a long-lived sequence does not hold the memory of all.
            state = {layer: tuple(t[s].clone() for t in tensors) for layer, tensors in states.items()}
            for seq in seqs:
                earlier = self._kept.get(seq, [])
                kept = fresh[seq] = [*(earlier[:-1] if seq in replace else earlier), (count, state)]
                if len(kept) > self.checkpoints + 1:
                    # The cheapest to compute again from the one before goes; the latest stays, to undo a batch.
                    seen = [0, *(count for count, _ in kept)]
                    del kept[min(range(len(kept) - 2), key=lambda i: seen[i + 1] - seen[i])]
        self._kept.update(fresh)

    def truncate(self, seq: int, count: int) -> None:
        """Go back to the first `count` rows. The caller has asked `has`."""
        kept = [entry for entry in self._kept.pop(seq, ()) if entry[0] <= count]
        if count and kept:
            self._kept[seq] = kept

    def copy(self, src: int, dst: int, count: int) -> None:
        """Let `dst` stand where `src` did after its first `count` rows. Shares states, copies none."""
        if kept := [entry for entry in self._kept.get(src, ()) if entry[0] <= count]:
            self._kept[dst] = kept

    def reorder(self, seqs: Sequence[int], sources: Sequence[int]) -> None:
        """seqs[i] becomes what sources[i] was."""
        before = [self._kept.get(source) for source in sources]
        for seq, kept in zip(seqs, before, strict=True):
            self._kept.pop(seq, None)
            if kept:
                self._kept[seq] = kept

    def clear(self) -> None:
        """Forget all states."""
        self._kept.clear()
