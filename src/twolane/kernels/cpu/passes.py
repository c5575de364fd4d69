"""Forward passes over layers of few bits, compiled: tasks of one kind after the other, which the
threads of a team take as they come.

Arguments are tables of int64 with addresses and sizes, of the fields below.
"""

from collections.abc import Callable, Mapping
from enum import IntEnum

from twolane.kernels.cpu.compiler import Program
from twolane.kernels.cpu.formats import ACTIVATION_BYTES
from twolane.kernels.cpu.instructions import (
    CHUNK,
    INSTRUCTIONS,
    MANY,
    TILES,
    Code,
    add,
    begin_tiles,
    copy,
    end_tiles,
    futex,
    gate,
    give_way,
    hide,
    leave,
    multiply,
    multiply_many,
    normalise,
    pause,
    quantise,
    read,
    score,
    soften,
    turn,
    weigh,
    write,
)

_WAIT, _WAKE = 128, 129
"""Operations of futex(2) within a process."""
SPINS = 2000
"""Turns that a thread waits for others before it gives its core away for a moment."""
FEW = 8
"""Tokens of one sequence that an attention task has at most, and rows of a norm's."""


class TeamField(IntEnum):
    """Fields of a team's table. Those that several threads write have cache lines of their own."""

    NEXT = 0
    """The tasks of the first half of a job, times 2**32, plus the number of those taken."""
    NEXT_LATER = 8
    """The same of the second half."""
    DONE = 16
    """The tasks of a job that are done."""
    AWAKE = 24
    """1 while there may be jobs, 2 when there will be none any more."""
    KIND = 32
    LAYER = 33
    PASS = 34
    LATER = 35
    """The first task of the second half."""
    SIZE = 40


class JobKind(IntEnum):
    """The kinds of jobs, those of a layer first, in their order."""

    NORM = 0
    PROJECT = 1
    ATTEND = 2
    PROJECT_BACK = 3
    MLP_NORM = 4
    ACTIVATE = 5
    MLP_BACK = 6
    QUANTISE = 7
    PRODUCT = 8


class LayerField(IntEnum):
    """Fields of a layer's table: addresses, formats, and the tokens of a window, or 0."""

    NORM = 0
    QKV = 1
    QKV_FORM = 2
    BIAS = 3
    HEAD_NORM = 4
    POOL = 5
    WINDOW = 6
    O = 7  # noqa: E741
    O_FORM = 8
    MLP_NORM = 9
    GATE_UP = 10
    GATE_UP_FORM = 11
    DOWN = 12
    DOWN_FORM = 13
    SIZE = 14


class PassField(IntEnum):
    """Fields of a pass' table: addresses and sizes."""

    ROWS = 0
    HIDDEN = 1
    """float32 [rows, hidden]"""
    WIDTH = 2
    """Width of the hidden states."""
    INPUT = 3
    """Blocks of what a projection reads. Here and in the other fields of blocks, those of all rows
    are followed by as many blocks of what the first ones leave of the numbers."""
    HEADS = 4
    """float32 [rows, all heads, head_dim]"""
    QUERY_HEADS = 5
    KEY_HEADS = 6
    DIM = 7
    ATTENDED = 8
    """Blocks of attention's output."""
    INNER = 9
    """Width of the MLP."""
    ACTIVATED = 10
    """Blocks of what the MLP's way back reads."""
    TURNS = 11
    """Cosine and sine of each row and pair."""
    SLOTS = 12
    """Slot of each row."""
    PARTS = 13
    """[parts, 4]: first row, rows, position of the first, address of the sequence's slots."""
    PARTS_COUNT = 14
    FACTORS = 15
    """float32: the norms' epsilon, that of heads, and the factor of scores."""
    ZEROS = 16
    SCRATCH = 17
    """Memory of each thread."""
    SCRATCH_BYTES = 18
    SCORES = 19
    """Floats of a query's scores."""
    MATRIX = 20
    """Tiles of a single product, and after them format, input, its columns, output, its columns."""
    FORM = 21
    SOURCE = 22
    COLUMNS = 23
    OUT = 24
    OUT_WIDTH = 25
    SOURCE_NORM = 26
    """The weights of the norm of a single product's input, or 0."""
    SIZE = 27


def _get(table: int, field: int) -> int:
    return read(table + 8 * field)


def _multiply(
    form: int,
    w: int,
    x: int,
    wide: int,
    rows: int,
    p: int,
    blocks: int,
    begin: int,
    step: int,
    out: int,
    apart: int,
) -> None:
    """Multiply any number of rows of a pass, both of their blocks, with a tile; see `multiply`."""
    for _ in range(2):
        done = 0
        if TILES and rows >= MANY:
            groups = rows // MANY
            multiply_many(form, groups, w, x, wide, blocks, begin, step, out, apart)
            done = groups * MANY
        while done < rows:
            left = rows - done
            count = 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1
            at, to, after = x + done * wide, begin + done * step, out + done * apart
            multiply(form, count, w, at, wide, blocks, to, step, after, apart)
            done += count
        # What the first blocks leave is added to their products.
        x += _get(p, PassField.ROWS) * wide
        begin, step = out, apart


def _blocks_of(x: int, p: int, to: int, blocks: int, wide: int) -> None:
    """Write the blocks of a row's numbers, and the blocks of what these leave, which have their
    place after the first blocks of all rows, `wide` bytes each. The numbers at `x` are lost."""
    quantise(x, to, blocks)
    leave(x, to, blocks)
    quantise(x, to + _get(p, PassField.ROWS) * wide, blocks)


def _tile_bytes(form: int, blocks: int) -> int:
    return blocks * (320 if form == 0 else 384 if form == 1 else 576)


def _norm_rows(weight: int, p: int, first: int, scratch: int) -> None:
    """Normalise rows of hidden states as inputs of a projection."""
    width = _get(p, PassField.WIDTH)
    blocks = width // 32
    for row in range(first, min(first + FEW, _get(p, PassField.ROWS))):
        x = _get(p, PassField.HIDDEN) + row * width * 4
        normalise(x, weight, _get(p, PassField.FACTORS), scratch, width // 16)
        wide = blocks * ACTIVATION_BYTES
        _blocks_of(scratch, p, _get(p, PassField.INPUT) + row * wide, blocks, wide)


def _project(layer: int, p: int, index: int) -> None:
    """Compute one head of queries, keys or values of up to `CHUNK` rows, turned, in its place."""
    heads, keys, dim = (
        _get(p, PassField.QUERY_HEADS),
        _get(p, PassField.KEY_HEADS),
        _get(p, PassField.DIM),
    )
    width = _get(p, PassField.WIDTH)
    every = heads + 2 * keys
    head, first = index % every, (index // every) * CHUNK
    rows = min(CHUNK, _get(p, PassField.ROWS) - first)
    blocks, form, apart = width // 32, _get(layer, LayerField.QKV_FORM), every * dim * 4
    size, wide = _tile_bytes(form, blocks), blocks * ACTIVATION_BYTES
    x = _get(p, PassField.INPUT) + first * wide
    out = _get(p, PassField.HEADS) + first * apart + head * dim * 4
    bias = _get(layer, LayerField.BIAS)
    for tile in range(dim // 16):
        w = _get(layer, LayerField.QKV) + (head * (dim // 16) + tile) * size
        begin = bias + (head * dim + tile * 16) * 4 if bias else _get(p, PassField.ZEROS)
        _multiply(form, w, x, wide, rows, p, blocks, begin, 0, out + tile * 64, apart)
    norm = _get(layer, LayerField.HEAD_NORM)
    for row in range(first, first + rows):
        at = out + (row - first) * apart
        if head < heads + keys:
            if norm:
                normalise(at, norm + head * dim * 4, _get(p, PassField.FACTORS) + 4, at, dim // 16)
            turn(at, _get(p, PassField.TURNS) + row * dim * 4, dim // 16)
        if head >= heads:
            slot = read(_get(p, PassField.SLOTS) + 8 * row)
            to = _get(layer, LayerField.POOL) + (slot * 2 * keys + head - heads) * dim * 4
            copy(at, to, dim // 16)


def _attend(layer: int, p: int, index: int, scratch: int) -> None:
    """Attend with up to `FEW` neighbouring tokens of a sequence in the heads that share keys."""
    heads, keys, dim = (
        _get(p, PassField.QUERY_HEADS),
        _get(p, PassField.KEY_HEADS),
        _get(p, PassField.DIM),
    )
    part, key_head = _get(p, PassField.PARTS) + (index // keys) * 32, index % keys
    first, rows = read(part), read(part + 8)
    start, slots = read(part + 16), read(part + 24)
    group, every, window = heads // keys, heads + 2 * keys, _get(layer, LayerField.WINDOW)
    pool, wide = _get(layer, LayerField.POOL) + key_head * dim * 4, 2 * keys * dim * 4
    apart = _get(p, PassField.SCORES) * 4
    queries, scores = scratch, scratch + 64
    out = scores + 4 * apart
    for base in range(0, rows * group, 4):
        least, end = start + base // group, start + min(base + 3, rows * group - 1) // group + 1
        least = max(0, least - window + 1) if window else 0
        for i in range(4):
            each = min(base + i, rows * group - 1)
            row, head = first + each // group, key_head * group + each % group
            write(queries + 8 * i, _get(p, PassField.HEADS) + (row * every + head) * dim * 4)
        count = end - least
        padded = (count + 15) // 16
        seen = slots + 8 * least
        for j in range(0, count, 4):
            near, last = seen + 8 * j, 8 * (count - 1 - j)
            score(queries, pool, near, last, wide, dim // 16, scores + 4 * j, apart)
        for i in range(4):
            at = scores + i * apart
            position = start + min(base + i, rows * group - 1) // group
            known = position - least + 1
            hide(at + 4 * known, 16 * padded - known)
            if window:
                hide(at, max(0, known - window))
            soften(at, padded, _get(p, PassField.FACTORS) + 8)
        weigh(scores, apart, 64 * padded, pool + keys * dim * 4, seen, count, wide, dim // 32, out)
        for i in range(min(4, rows * group - base)):
            row, head = first + (base + i) // group, key_head * group + (base + i) % group
            size = (dim // 32) * ACTIVATION_BYTES
            to = _get(p, PassField.ATTENDED) + (row * heads + head) * size
            _blocks_of(out + i * dim * 4, p, to, dim // 32, heads * size)


def _add_product(w: int, form: int, x: int, columns: int, p: int, index: int) -> None:
    """Add products with two tiles to up to `CHUNK` rows of hidden states."""
    width = _get(p, PassField.WIDTH)
    pairs = (width + 31) // 32
    tile, first = 2 * (index % pairs), (index // pairs) * CHUNK
    rows, blocks = min(CHUNK, _get(p, PassField.ROWS) - first), columns // 32
    wide, apart = blocks * ACTIVATION_BYTES, width * 4
    for each in range(tile, min(tile + 2, width // 16)):
        out = _get(p, PassField.HIDDEN) + first * apart + each * 64
        w_tile, begin = w + each * _tile_bytes(form, blocks), x + first * wide
        _multiply(form, w_tile, begin, wide, rows, p, blocks, out, apart, out, apart)


def _activate(layer: int, p: int, index: int, scratch: int) -> None:
    """Compute 32 columns of up to `CHUNK` rows of the MLP."""
    width, inner = _get(p, PassField.WIDTH), _get(p, PassField.INNER)
    parts = inner // 32
    part, first = index % parts, (index // parts) * CHUNK
    rows, blocks, form = (
        min(CHUNK, _get(p, PassField.ROWS) - first),
        width // 32,
        _get(layer, LayerField.GATE_UP_FORM),
    )
    size, wide = _tile_bytes(form, blocks), blocks * ACTIVATION_BYTES
    x = _get(p, PassField.INPUT) + first * wide
    for each in range(4):
        tile = 2 * part + each % 2 + (each // 2) * (inner // 16)
        w = _get(layer, LayerField.GATE_UP) + tile * size
        to, zeros = scratch + each * 64, _get(p, PassField.ZEROS)
        _multiply(form, w, x, wide, rows, p, blocks, zeros, 0, to, 256)
    for row in range(rows):
        gate(scratch + row * 256, scratch + row * 256 + 128, 2)
        to = _get(p, PassField.ACTIVATED) + ((first + row) * parts + part) * ACTIVATION_BYTES
        _blocks_of(scratch + row * 256, p, to, 1, parts * ACTIVATION_BYTES)


def _quantise_rows(p: int, first: int, scratch: int) -> None:
    """Make rows the input of a single product, after their norm if it has one."""
    columns, norm = _get(p, PassField.COLUMNS), _get(p, PassField.SOURCE_NORM)
    blocks = columns // 32
    for row in range(first, min(first + FEW, _get(p, PassField.ROWS))):
        source = _get(p, PassField.SOURCE) + row * columns * 4
        if norm:
            normalise(source, norm, _get(p, PassField.FACTORS), scratch, columns // 16)
        else:
            copy(source, scratch, columns // 16)
        wide = blocks * ACTIVATION_BYTES
        _blocks_of(scratch, p, _get(p, PassField.INPUT) + row * wide, blocks, wide)


def _product(p: int, index: int) -> None:
    """Compute up to eight tiles of up to `CHUNK` rows of a single product."""
    tiles, blocks, form = (
        _get(p, PassField.OUT_WIDTH) // 16,
        _get(p, PassField.COLUMNS) // 32,
        _get(p, PassField.FORM),
    )
    parts = (tiles + 7) // 8
    part, first = index % parts, (index // parts) * CHUNK
    rows, wide, apart = (
        min(CHUNK, _get(p, PassField.ROWS) - first),
        blocks * ACTIVATION_BYTES,
        tiles * 64,
    )
    for tile in range(8 * part, min(8 * part + 8, tiles)):
        w = _get(p, PassField.MATRIX) + tile * _tile_bytes(form, blocks)
        x, out = (
            _get(p, PassField.INPUT) + first * wide,
            _get(p, PassField.OUT) + first * apart + tile * 64,
        )
        _multiply(form, w, x, wide, rows, p, blocks, _get(p, PassField.ZEROS), 0, out, apart)


def _do(kind: int, layer: int, p: int, index: int, scratch: int) -> None:
    """Do one task of a job."""
    many = TILES and _get(p, PassField.ROWS) >= MANY
    if many:
        begin_tiles()
    if kind == JobKind.NORM:
        _norm_rows(_get(layer, LayerField.NORM), p, index * FEW, scratch)
    elif kind == JobKind.PROJECT:
        _project(layer, p, index)
    elif kind == JobKind.ATTEND:
        _attend(layer, p, index, scratch)
    elif kind == JobKind.PROJECT_BACK:
        columns = _get(p, PassField.QUERY_HEADS) * _get(p, PassField.DIM)
        w, form = _get(layer, LayerField.O), _get(layer, LayerField.O_FORM)
        _add_product(w, form, _get(p, PassField.ATTENDED), columns, p, index)
    elif kind == JobKind.MLP_NORM:
        _norm_rows(_get(layer, LayerField.MLP_NORM), p, index * FEW, scratch)
    elif kind == JobKind.ACTIVATE:
        _activate(layer, p, index, scratch)
    elif kind == JobKind.MLP_BACK:
        w, form = _get(layer, LayerField.DOWN), _get(layer, LayerField.DOWN_FORM)
        _add_product(w, form, _get(p, PassField.ACTIVATED), _get(p, PassField.INNER), p, index)
    elif kind == JobKind.QUANTISE:
        _quantise_rows(p, index * FEW, scratch)
    else:
        _product(p, index)
    if many:
        end_tiles()


def _tasks(kind: int, p: int) -> int:
    """Return the number of tasks of a job."""
    rows, width = _get(p, PassField.ROWS), _get(p, PassField.WIDTH)
    chunks, tasks = (rows + CHUNK - 1) // CHUNK, (rows + FEW - 1) // FEW
    if kind == JobKind.PROJECT:
        tasks = chunks * (_get(p, PassField.QUERY_HEADS) + 2 * _get(p, PassField.KEY_HEADS))
    elif kind == JobKind.ATTEND:
        tasks = _get(p, PassField.PARTS_COUNT) * _get(p, PassField.KEY_HEADS)
    elif kind == JobKind.PROJECT_BACK or kind == JobKind.MLP_BACK:
        tasks = chunks * ((width + 31) // 32)
    elif kind == JobKind.ACTIVATE:
        tasks = chunks * (_get(p, PassField.INNER) // 32)
    elif kind == JobKind.PRODUCT:
        tasks = chunks * ((_get(p, PassField.OUT_WIDTH) // 16 + 7) // 8)
    return tasks


def _taken(place: int) -> int:
    """Take one of the tasks at a place; return its number there, or -1 if none is left."""
    state = read(place)
    if (state & 0xFFFFFFFF) >= (state >> 32):
        return -1
    state = add(place, 1)  # of this job or of a later one, but of one that is not done
    index = state & 0xFFFFFFFF
    return index if index < (state >> 32) else -1


def _take(team: int, thread: int) -> bool:
    """Do one task of the job, if one is left; return whether one was.

    Every second thread begins with the second half, so that each reads a matrix in its order.
    """
    later = thread & 1
    index = _taken(team + 8 * (TeamField.NEXT_LATER if later else TeamField.NEXT))
    if index < 0:
        later = 1 - later
        index = _taken(team + 8 * (TeamField.NEXT_LATER if later else TeamField.NEXT))
    if index < 0:
        return False
    if later:
        index += _get(team, TeamField.LATER)
    p = _get(team, TeamField.PASS)
    scratch = _get(p, PassField.SCRATCH) + thread * _get(p, PassField.SCRATCH_BYTES)
    _do(_get(team, TeamField.KIND), _get(team, TeamField.LAYER), p, index, scratch)
    add(team + 8 * TeamField.DONE, 1)
    return True


def _wait(turns: int) -> None:
    if turns < SPINS:
        pause()
    else:
        give_way()


def _job(team: int, kind: int, layer: int, p: int) -> None:
    """Do all tasks of a job together with the team's other threads."""
    tasks = _tasks(kind, p)
    if tasks == 1:
        _do(kind, layer, p, 0, _get(p, PassField.SCRATCH))
        return
    write(team + 8 * TeamField.KIND, kind)
    write(team + 8 * TeamField.LAYER, layer)
    write(team + 8 * TeamField.PASS, p)
    write(team + 8 * TeamField.DONE, 0)
    half = (tasks + 1) // 2
    write(team + 8 * TeamField.LATER, half)
    write(team + 8 * TeamField.NEXT, half << 32)
    write(team + 8 * TeamField.NEXT_LATER, (tasks - half) << 32)
    while _take(team, 0):
        pass
    turns = 0
    while read(team + 8 * TeamField.DONE) < tasks:
        _wait(turns)
        turns += 1


def _wake(team: int, state: int) -> None:
    write(team + 8 * TeamField.AWAKE, state)
    futex(team + 8 * TeamField.AWAKE, _WAKE, 1073741824)


def work(team: int, thread: int) -> None:
    """Do tasks as a further thread of a team, until it ends."""
    turns = 0
    awake = 1
    while awake < 2:
        if _take(team, thread):
            turns = 0
        else:
            _wait(turns)
            turns += 1
            awake = read(team + 8 * TeamField.AWAKE)
            if awake == 0:
                futex(team + 8 * TeamField.AWAKE, _WAIT, 0)
                turns = 0


def end(team: int) -> None:
    """Let a team's further threads end."""
    _wake(team, 2)


def run_layers(team: int, layers: int, count: int, p: int) -> None:
    """Run so many layers, whose tables follow each other, on the hidden states of a pass."""
    _wake(team, 1)
    for i in range(count):
        for kind in range(JobKind.NORM, JobKind.QUANTISE):
            _job(team, kind, layers + i * 8 * LayerField.SIZE, p)
    write(team + 8 * TeamField.AWAKE, 0)


def run_product(team: int, p: int) -> None:
    """Compute a single product."""
    _wake(team, 1)
    for kind in range(JobKind.QUANTISE, JobKind.PRODUCT + 1):
        _job(team, kind, 0, p)
    write(team + 8 * TeamField.AWAKE, 0)


_INTERNAL: tuple[Callable[..., object], ...] = (
    *(_get, _multiply, _blocks_of, _tile_bytes, _norm_rows, _project, _attend),
    *(_add_product, _activate, _quantise_rows, _product, _do, _tasks, _taken, _take, _wait),
    *(_job, _wake),
)
EXPORTED: Mapping[str, int] = {"work": 2, "end": 1, "run_layers": 4, "run_product": 2}
"""Number of arguments of each function that is called from outside, by their names."""


def program() -> Program:
    """Return the functions of this module, translated."""
    made = Program(INSTRUCTIONS, Code)
    for each in _INTERNAL:
        made.add(each)
    exported: tuple[Callable[..., None], ...] = work, end, run_layers, run_product
    for function in exported:
        made.add(function, exported=True)
    return made
