"""Tile sizes of the GPU's own kernels, by device, and what a device can do.

`TUNINGS` has a row for each card that was measured; any other runs with the H200's, and results say so.
`python -m experiments.benchmarks.kernels.tune` measures the row of the card at hand and prints it. A row is what was
fastest at MolmoE-1B's widths in bfloat16; for other widths and dtypes the functions below take tiles of as many bytes,
or such as fit. Importing this module does not need Triton.
"""

from dataclasses import dataclass, replace

import torch

from experiment_core_utils.engines.weights import DecoderWeights

# Shared memory of a program, in bytes, that the widest tile takes.
MEMORY_OF_WIDE_TILES = 160 * 1024
# Bytes of a weight's row that the warps of a table's row take in their registers, and warps of a program at most.
WIDE_ROW, MOST_WARPS = 16 * 1024, 16
# Rows of a product where they are few: what tensor cores take at least, and what shared memory bounds.
FEWEST_ROWS, MOST_ROWS = 16, 32
# Of the choice of diverse tokens: fastest of 1 to 32 at 729 to 2,916 features on an H200.
DIVERSE_WARPS = 16


@dataclass(frozen=True)
class Card:
    """What a device can do; everything is missing where it is no CUDA device."""

    name: str = ""
    capability: int = 0  #: the first number of its compute capability
    shared_memory: int = 0  #: bytes that a program may have

    @classmethod
    def of(cls, device: torch.device) -> "Card":
        """The card of a device."""
        if device.type != "cuda":
            return cls()
        found = torch.cuda.get_device_properties(device)
        return cls(found.name, found.major, getattr(found, "shared_memory_per_block_optin", 0))

    @property
    def has_tf32(self) -> bool:
        """Whether its tensor cores multiply tf32."""
        return self.capability >= 8

    @property
    def is_hopper(self) -> bool:
        """Whether it has what came with Hopper: PDL (launches that overlap), bulk copies, cuDNN's faster attention."""
        return self.capability >= 9


@dataclass(frozen=True)
class Tile:
    """Sizes of one program: in each of so many steps, so many rows of a weight, by so many warps.

    In attention the rows are positions of the KV cache, and the steps as many as there are.
    """

    rows: int
    warps: int
    steps: int = 1


@dataclass(frozen=True)
class ReadTile:
    """A `Tile` of weight rows that fill so many KiB.

    A tile is read by one load for each thread's part, so that all of it is on its way at once; registers bound it.
    Where a tile has two steps, the second is read while the first is multiplied. A row of more than WIDE_ROW bytes is
    shared by as many more warps.
    """

    kibibytes: int
    warps: int
    steps: int = 1

    def of_rows(self, row_bytes: int) -> Tile:
        """The power of two of rows that fill it, at least 1."""
        padded = 1 << (row_bytes - 1).bit_length()
        warps = min(MOST_WARPS, self.warps * max(1, padded // WIDE_ROW))
        return Tile(max(1, self.kibibytes * 1024 // padded), warps, self.steps)


@dataclass(frozen=True)
class SmallBatchTile:
    """Rows of the weight and columns of one step that a program takes, its warps, and its loads in flight."""

    rows: int
    step: int
    warps: int
    stages: int


@dataclass(frozen=True)
class ProductTile:
    """Sizes of one program: weight rows, factor step, rows of the two parts of a row block, warps and loads in flight.

    Without a second part (`tail` 0) every row block is computed as a whole one, which takes less shared memory.
    `bulk`: the weights come by the bulk copy engine, which GPUs have from Hopper on.
    """

    strip: int
    step: int
    head: int
    tail: int
    warps: int
    stages: int
    bulk: bool = False

    @property
    def row_block(self) -> int:
        """Rows of one expert that a program takes at once."""
        return self.head + self.tail


@dataclass(frozen=True)
class Tuning:
    """What was fastest on one card."""

    #: qkv, attention, output, gate_up, dense_gate_up, down, head: kernels of a decode step of one request
    qkv: ReadTile
    attention: ReadTile
    output: ReadTile
    gate_up: ReadTile  #: of chosen experts
    dense_gate_up: ReadTile  #: of dense blocks and shared experts
    down: ReadTile
    head: ReadTile
    step_programs: int  #: as many at least share all heads' positions there
    most_splits: int  #: as many at most share one head's, which are put together at once
    ahead: int  #: KiB of weights read later that attention there asks for while it waits for its sums
    #: of a program of the output product there, which writes a part of the router's logits: its tile may double for it
    fewest_router_rows: int
    slots_at_once: int  #: choices whose down-projections a program there reads before it multiplies them
    whole_columns: int  #: of an expert's down-projection there, which a program reads whole; registers bound them
    dense_columns: int  #: of a dense block's, or of a wider expert's, which count as one choice there
    router_parts: int  #: parts of the router's logits that the last program of its output product reads at once
    next_token_warps: int  #: of the choice of the next token, in every step
    fewest_together: int  #: from so many requests on a step that reads weights once for all of them is the faster one
    attention_programs: int  #: about so many share all heads' positions there
    batch_splits: tuple[int, int]  #: least and most that share one head's there
    most_requests: int  #: of one program of its products; registers bound them
    batch_dense: SmallBatchTile  #: its QKV product and its head
    batch_output: SmallBatchTile  #: its output product
    batch_routing: Tile  #: columns of its router
    batch_sum_warps: int  #: of its sums of experts' rows
    #: prefill_gate_up, prefill_down: grouped GEMM of a prompt's experts
    prefill_gate_up: ProductTile
    prefill_down: ProductTile
    alignment: Tile  #: choices that a program of the block alignment looks at in one step
    routing: SmallBatchTile  #: tokens of a prompt and columns of its router
    row_warps: int  #: of passes over a row of a prompt's or picture's states, or a window of patches
    elementwise: Tile  #: elements of a pass over all states of a picture, or over a prompt's gated units


# By a part of the card's name.
TUNINGS = {
    "H200": Tuning(
        qkv=ReadTile(kibibytes=16, warps=4, steps=2),
        attention=ReadTile(kibibytes=16, warps=2),
        output=ReadTile(kibibytes=32, warps=4),
        gate_up=ReadTile(kibibytes=16, warps=4),
        dense_gate_up=ReadTile(kibibytes=8, warps=4, steps=2),
        down=ReadTile(kibibytes=32, warps=4),
        head=ReadTile(kibibytes=32, warps=8),
        step_programs=384,
        most_splits=32,
        ahead=8192,
        fewest_router_rows=8,
        slots_at_once=8,
        whole_columns=4096,
        dense_columns=1024,
        router_parts=16384,
        next_token_warps=8,
        fewest_together=6,
        attention_programs=512,
        batch_splits=(2, 24),
        most_requests=64,
        batch_dense=SmallBatchTile(rows=64, step=128, warps=4, stages=4),
        batch_output=SmallBatchTile(rows=16, step=128, warps=4, stages=4),
        batch_routing=Tile(rows=512, warps=8),
        batch_sum_warps=4,
        prefill_gate_up=ProductTile(strip=128, step=64, head=128, tail=32, warps=8, stages=3),
        prefill_down=ProductTile(strip=256, step=64, head=128, tail=32, warps=8, stages=4, bulk=True),
        alignment=Tile(rows=2048, warps=8),
        routing=SmallBatchTile(rows=16, step=128, warps=4, stages=4),
        row_warps=4,
        elementwise=Tile(rows=4096, warps=8),
    ),
}

DEFAULT = "H200"


def tuning_of(card: str) -> Tuning:
    """The row of a card of that name, or the default's."""
    return next((row for name, row in TUNINGS.items() if name in card), TUNINGS[DEFAULT])


def tuning_at(device: torch.device) -> Tuning:
    """The row of a device's card, or the default's."""
    return tuning_of(Card.of(device).name)


def untuned_reason(card: str) -> str | None:
    """What is to be said of own kernels on a card of that name; None on one that has a row."""
    if any(name in card for name in TUNINGS):
        return None
    return f"own kernels run with sizes that were tuned on an {DEFAULT}, not on an {card}"


@dataclass(frozen=True)
class StepTiles:
    """The tiles of a decode step of one request."""

    qkv: Tile
    attention: Tile
    splits: int  # programs that share one head's positions
    output: Tile
    gate_up: Tile  # rows of the gate, and as many of the up-projection, of a chosen expert
    dense_gate_up: Tile  # of a dense block or a shared expert
    down: Tile  # rows of each choice's expert
    head: Tile


def tiles_for(decoder: DecoderWeights, top_k: int, max_seq_len: int, row: Tuning | None = None) -> StepTiles:
    """The tiles of a decode step by a row of the table; None takes that of the decoder's device."""
    tuned = tuning_at(decoder.device) if row is None else row
    size = decoder.dtype.itemsize
    width, inner, head = decoder.width * size, decoder.expert_width * size, decoder.head_width * size
    attention, down = tuned.attention.of_rows(head), tuned.down.of_rows(min(top_k, tuned.slots_at_once) * inner)
    fewest, output = -(-tuned.step_programs // decoder.num_heads), tuned.output.of_rows(decoder.num_heads * head)
    if decoder.routed_blocks:
        output = replace(output, rows=min(2 * output.rows, max(output.rows, tuned.fewest_router_rows)))
    return StepTiles(
        qkv=tuned.qkv.of_rows(width),
        attention=attention,
        splits=min(tuned.most_splits, max(fewest, -(-max_seq_len // attention.rows))),
        output=output,
        gate_up=tuned.gate_up.of_rows(width),
        dense_gate_up=tuned.dense_gate_up.of_rows(width),
        down=Tile(min(2, down.rows), tuned.down.warps),
        head=tuned.head.of_rows(width),
    )


@dataclass(frozen=True)
class BatchTiles:
    """The tiles of a decode step of several requests together."""

    qkv: SmallBatchTile
    attention: Tile
    splits: int  # programs that share one head's positions
    output: SmallBatchTile
    experts: tuple[ProductTile, ProductTile]  # gate and up; down
    head: SmallBatchTile


def batch_tiles_for(decoder: DecoderWeights, top_k: int, max_seq_len: int, batch: int) -> BatchTiles:
    """Tiles of a decode step of several requests."""
    tuned = tuning_at(decoder.device)
    fewest, most = tuned.batch_splits
    programs, rows = batch * decoder.num_heads, _rows_of_expert(decoder, top_k, batch)
    dense = _fitting(tuned.batch_dense, decoder.width, decoder.dtype)
    return BatchTiles(
        qkv=dense,
        attention=tiles_for(decoder, top_k, max_seq_len, tuned).attention,
        splits=min(most, max(fewest, -(-tuned.attention_programs // programs))),
        output=_fitting(tuned.batch_output, decoder.num_heads * decoder.head_width, decoder.dtype),
        experts=tiles_of_few_rows(decoder.width, decoder.expert_width, decoder.head, rows),
        head=dense,
    )


def _fitting(tile: SmallBatchTile, width: int, dtype: torch.dtype) -> SmallBatchTile:
    if dtype.itemsize == 2:
        return SmallBatchTile(tile.rows, divisor(width, tile.step), tile.warps, tile.stages)
    return SmallBatchTile(tile.rows, divisor(width, 32), tile.warps, 2)


def _rows_of_expert(decoder: DecoderWeights, top_k: int, batch: int) -> int:
    """The power of two above twice the rows that an expert gets where all are chosen equally often."""
    twice = 2 * batch * top_k // decoder.num_experts
    return min(max(1 << twice.bit_length(), FEWEST_ROWS), MOST_ROWS)


def prefill_tiles_for(width: int, expert_width: int, like: torch.Tensor) -> tuple[ProductTile, ProductTile]:
    """Tiles of a prompt's two grouped GEMMs (gate and up; down), for weights like these.

    Both share one list of row blocks, so both take the same number of rows.
    """
    card, sizes = Card.of(like.device), ((expert_width, width), (width, expert_width))
    is_wide = card.shared_memory >= MEMORY_OF_WIDE_TILES
    if like.dtype == torch.float32:
        stages = 3 if is_wide else 2
        first, second = (ProductTile(divisor(n, 64), divisor(k, 32), 64, 32, warps=4, stages=stages) for n, k in sizes)
    elif not is_wide or min(divisor(n, 128) for n, _ in sizes) < 128:
        first, second = (ProductTile(divisor(n, 64), divisor(k, 64), 64, 32, warps=4, stages=3) for n, k in sizes)
    else:
        tuned = tuning_of(card.name)
        first, second = (
            _fitting_product(tile, n, k, card.is_hopper)
            for tile, (n, k) in zip((tuned.prefill_gate_up, tuned.prefill_down), sizes, strict=True)
        )
    return first, second


def _fitting_product(tile: ProductTile, outer: int, inner: int, is_hopper: bool) -> ProductTile:
    """The tile with sizes that divide the weight's; without bulk copies the largest is too large."""
    step = divisor(inner, tile.step)
    if tile.bulk and not is_hopper:
        return ProductTile(128, step, tile.head, tile.tail, warps=8, stages=3)
    return ProductTile(divisor(outer, tile.strip), step, tile.head, tile.tail, tile.warps, tile.stages, tile.bulk)


def tiles_of_few_rows(width: int, expert_width: int, like: torch.Tensor, rows: int) -> tuple[ProductTile, ProductTile]:
    """As `prefill_tiles_for`, where reading weights is what takes the time: row blocks of `rows`, FEWEST_ROWS to
    MOST_ROWS.
    """
    card = Card.of(like.device)
    wide = card.shared_memory >= MEMORY_OF_WIDE_TILES and like.dtype != torch.float32
    most, steps = (128, 128 if card.is_hopper else 64) if wide else (64, 32)

    def tile(outer: int, inner: int, warps: int) -> ProductTile:
        strip, step = divisor(outer, most), divisor(inner, steps)
        bulk = card.is_hopper and wide and strip == most
        return ProductTile(strip, step, head=rows, tail=0, warps=warps, stages=3 if wide else 2, bulk=bulk)

    return tile(expert_width, width, 8 if wide else 4), tile(width, expert_width, 4)


def step_of_router(columns: int, experts: int) -> int:
    """Columns of a router of so many experts that a program takes at once: of over 128 experts as many numbers as of
    128, for which the row's tile was measured.
    """
    return max(16, min(columns, columns * 128 // experts))


def divisor(size: int, most: int) -> int:
    """The largest power of two up to `most` that divides `size`."""
    return min(size & -size, most)
