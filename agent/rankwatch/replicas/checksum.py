"""Tensor -> its checksum: two lanes, each an integer modulo 2^64, the same on the host and on devices.

A tensor's bits, in its logical order, are cut into little-endian words of 64 bits; the last one is filled up with zeros.

Lane 1 is the sum of the words. A flipped bit always changes it, and the shares of shards add up to the lane of the whole.
Lane 2 is the sum of (2 i + 1) * fold(word i): it sees words that changed places. Of more than EXACT_WORDS words, i counts rows of
ROW_WORDS words, and a row's sum is folded: so a single read of the memory is enough, but elements that changed places within
one row (of 512 bytes) are not seen. ``fold`` mixes the upper bits into the lower ones. Without it, lane 2 would not see two
words that differ in the upper bits alone, as 0 and -0 do: the upper bits of a product are lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..measure import kernel
from ..measure.extremes import Unmeasurable, has_values, is_stored_apart, local, split

EXACT_WORDS = 4 * 1024
ROW_WORDS = kernel.WORDS_PER_ROW

_WORD = 8
_CACHED_WORDS = 64 * 1024
"""Words, or sums of rows, that are worked on at a time: of many tensors that are joined, or of a large one. They stay in the
second-level cache."""
_COPIED_ROWS = 16 * 1024
"""Rows that are copied at a time, where they do not lie in memory as they are needed."""


def readable(tensor: Tensor) -> bool:
    """Whether a tensor has bits that can be read: not if it is meta, lazy, quantized, or its memory is given back."""
    if not _is_plain(tensor):
        if is_lazy(tensor):
            return False
        try:
            tensor = local(tensor)
        except (Unmeasurable, RuntimeError):
            return False
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # its memory, if any, is not its values
            return False
    return not (tensor.is_meta or tensor.is_quantized) and has_values(tensor)


def write_all(tensors: Sequence[Tensor], into: Tensor, offsets: Sequence[int] | None = None) -> None:
    """Writes both lanes of each tensor into its row of ``into``, two int64. Never waits for a device.

    All must be ``readable`` and on one device. Tensors of the same size are joined, which is much cheaper than one by one.

    Args:
        offsets: where each begins in a larger tensor, in elements, if it is a shard: the lanes 1 of the shards add up.
    """
    joined = _Joined()
    with torch.no_grad():
        for index, tensor in enumerate(tensors):
            values = _plain(tensor)
            size = values.dtype.itemsize
            lead = offsets[index] * size % _WORD if offsets is not None else 0
            count = -(-(lead + values.numel() * size) // _WORD)
            if count == 0:
                into[index].zero_()
            elif count <= EXACT_WORDS:
                joined.add(index, _words(values, lead, count))
            elif (in_order := lead == 0 and _is_in_order(values)) and kernel.can_sum(values):
                kernel.record_lanes(values, into[index].zero_())
            else:
                sums = (part.sum(1) for part in (_rows(values.view(-1)) if in_order else _copied(values, lead)))
                if count > ROW_WORDS * _CACHED_WORDS:
                    _add_parts(sums, into[index].zero_())
                else:
                    joined.add(index, torch.cat(list(sums)))
        joined.write(into)


class _Joined:
    """The lanes of tensors that are joined where they have the same number of words, or of rows, whose sums are then given.

    So a few operators are enough for many tensors.
    """

    def __init__(self) -> None:
        self._words: dict[int, list[tuple[int, Tensor]]] = {}
        self._indices: list[int] = []
        self._lanes: list[Tensor] = []

    def add(self, index: int, words: Tensor) -> None:
        count = len(words)
        found = self._words.setdefault(count, [])
        found.append((index, words))
        if len(found) * count >= _CACHED_WORDS:
            self._take(self._words.pop(count))

    def write(self, into: Tensor) -> None:
        """Writes the lanes of each tensor into its row of ``into``."""
        for found in self._words.values():
            self._take(found)
        if into.is_cpu and self._lanes:
            into.index_copy_(0, torch.tensor(self._indices, device="cpu"), torch.cat(self._lanes))
        elif self._lanes:  # without an index, for which the host would wait
            places = [into[index] for index in self._indices]
            torch._foreach_copy_(places, [pair for some in self._lanes for pair in some.unbind(0)])

    def _take(self, found: list[tuple[int, Tensor]]) -> None:
        self._indices += [index for index, _ in found]
        self._lanes.append(_lanes_of(torch.stack([words for _, words in found]), 0))


def _add_parts(sums: Iterable[Tensor], into: Tensor) -> None:
    """Adds both lanes of a large tensor to ``into``, by the sums of its rows, which come in parts."""
    first = 0
    for part in sums:
        into += _lanes_of(part, first)
        first += len(part)


def _lanes_of(words: Tensor, first: int) -> Tensor:
    """Both lanes of words, or of sums of rows: (..., words) -> (..., 2). ``first``: the i of the first one."""
    count = words.shape[-1]
    folded = words >> 29
    folded &= (1 << 35) - 1
    folded ^= words
    folded *= torch.arange(2 * first + 1, 2 * (first + count), 2, device=words.device)
    return torch.stack((words.sum(-1), folded.sum(-1)), -1)


def _rows(flat: Tensor) -> list[Tensor]:
    """The rows of a contiguous tensor, where they lie; the last words are a shorter row."""
    row = ROW_WORDS * _WORD // flat.dtype.itemsize
    done = flat.numel() // row * row
    whole = (flat if done == flat.numel() else flat[:done]).view(torch.int64).view(-1, ROW_WORDS)
    parts = [whole] if len(whole) <= _CACHED_WORDS else list(whole.split(_CACHED_WORDS))
    if done < flat.numel():
        rest = flat[done:]
        parts.append(_words(rest, 0, -(-rest.numel() * rest.dtype.itemsize // _WORD)).view(1, -1))
    return parts


def _copied(values: Tensor, lead: int) -> Iterator[Tensor]:
    """The rows of a tensor whose words do not lie in memory as they are needed: copied, part by part."""
    size, room = values.dtype.itemsize, _COPIED_ROWS * ROW_WORDS * _WORD
    buffer = torch.zeros(2 * room, dtype=torch.uint8, device=values.device)
    used = lead
    for part in split(values, room // size):
        end = used + part.numel() * size
        buffer[used:end].view(values.dtype).view(part.shape).copy_(part)
        used = end
        if used >= room:
            yield buffer[:room].view(torch.int64).view(-1, ROW_WORDS)
            used -= room
            buffer[:used] = buffer[room : room + used]
    rest = -(-used // (ROW_WORDS * _WORD)) * ROW_WORDS * _WORD
    buffer[used:rest] = 0
    if rest:
        yield buffer[:rest].view(torch.int64).view(-1, ROW_WORDS)


def _words(values: Tensor, lead: int, count: int) -> Tensor:
    """A small tensor's words: its own memory if they are there, else a copy with zeros around it."""
    size = values.dtype.itemsize
    if lead == 0 and values.numel() * size == count * _WORD and _is_in_order(values):
        return (values if values.dim() == 1 else values.view(-1)).view(torch.int64)
    padded = torch.zeros(count * _WORD, dtype=torch.uint8, device=values.device)
    padded[lead : lead + values.numel() * size].view(values.dtype).view(values.shape).copy_(values)
    return padded.view(torch.int64)


def _is_in_order(values: Tensor) -> bool:
    """Whether the logical order is that of the memory, and the memory can be read as words."""
    size = values.dtype.itemsize
    return (
        values.is_contiguous()
        and not (values.is_conj() or values.is_neg())
        and values.storage_offset() * size % _WORD == 0
        and values.data_ptr() % _WORD == 0
    )


def _is_plain(tensor: Tensor) -> bool:
    """Whether the values are those of the tensor itself, and no subclass does anything of its own."""
    kind = type(tensor)
    return (kind is nn.Parameter or kind is Tensor) and not is_stored_apart(tensor)


def _plain(tensor: Tensor) -> Tensor:
    """The values on this rank (see ``local``), without what a subclass does of its own."""
    if _is_plain(tensor):
        return tensor
    values = local(tensor)
    return values if type(values) is Tensor else values.as_subclass(Tensor)
