import gzip
import json
from pathlib import Path

import pytest

from twolane.workload import traces
from twolane.workload.traces import (
    TraceError,
    TraceRequest,
    clip_lengths,
    continued,
    has_arrivals,
    read_trace,
    scale_lengths,
    scale_rate,
    window,
)

PUBLIC = Path(__file__).parents[3] / "shared" / "traces"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def write(path: Path, text: str, packed: bool = False) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_csv_with_times(tmp_path, packed):
    text = HEADER + (
        "2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.9799600,3180,8\r\n"
    )
    requests = read_trace(write(tmp_path / "anything.txt", text, packed))
    assert [(r.prompt_tokens, r.output_tokens) for r in requests] == [(4808, 10), (3180, 8)]
    assert [r.arrival for r in requests] == pytest.approx([0.0, 1.0], abs=1e-6)


def test_csv_columns_go_by_name_not_place(tmp_path):
    text = "GeneratedTokens,extra,TIMESTAMP,ContextTokens\n7,x,,40\n"
    requests = read_trace(write(tmp_path / "t.jsonl", text))
    assert requests == [TraceRequest(None, 40, 7)]
    assert not has_arrivals(requests)


def test_times_with_a_zone_and_out_of_order(tmp_path):
    text = HEADER + "2024-05-10 00:00:02+00:00,5,1\r\n2024-05-10 00:00:00.5+00:00,6,1\r\n"
    requests = read_trace(write(tmp_path / "t", text))
    assert [(r.arrival, r.prompt_tokens) for r in requests] == [(0.0, 6), (1.5, 5)]


@pytest.mark.parametrize("packed", [False, True])
def test_mooncake(tmp_path, packed):
    rows = [
        {"timestamp": 3000, "input_length": 1025, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 4500, "input_length": 512, "output_length": 6, "hash_ids": [0]},
    ]
    text = "\n".join(json.dumps(row) for row in rows) + "\n"
    assert read_trace(write(tmp_path / "t.csv", text, packed)) == [
        TraceRequest(0.0, 1025, 5, (0, 1, 2)),
        TraceRequest(1.5, 512, 6, (0,)),
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_only_line_feeds_end_the_rows_of_json_lines(tmp_path, end):
    """Strings in them may hold what Unicode calls an end of line."""
    rows = [
        {"timestamp": 0, "input_length": 5, "output_length": tokens, "note": "a\u2028b\u2029c\x85d"}
        for tokens in (3, 4)
    ]
    text = end.join(json.dumps(row, ensure_ascii=False) for row in rows)
    requests = read_trace(write(tmp_path / "t.jsonl", text))
    assert requests == [TraceRequest(0.0, 5, 3), TraceRequest(0.0, 5, 4)]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("TIMESTAMP,ContextTokens\n,3\n", ["row 1", "GeneratedTokens"]),
        (HEADER + ",5,5\n,five,5\n", ["row 3", "ContextTokens", "five"]),
        (HEADER + ",5,0\n", ["row 2", "GeneratedTokens"]),
        (HEADER + ",5\n", ["row 2", "GeneratedTokens"]),
        (HEADER + "noon,5,5\n", ["row 2", "TIMESTAMP", "noon"]),
        (HEADER + "2023-11-16 18:17:03,5,5\n,5,5\n", ["empty in 1 rows"]),
        (HEADER, ["no requests"]),
        ('{"timestamp": 0, "input_length": 3}\n', ["row 1", "output_length"]),
        ('{"timestamp": 0, "input_length": 3, "output_length": 1}\n{"t\n', ["row 2"]),
        ('{"timestamp": "0", "input_length": 3, "output_length": 1}', ["row 1", "timestamp"]),
        ('{"timestamp": 0, "input_length": 3.5, "output_length": 1}', ["row 1", "input_length"]),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [4]}',
            ["row 1", "hash_ids", "2 blocks"],
        ),
        (
            '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [%d]}\n'
            * 2
            % ((1 << 64) - 1, 1 << 64),
            ["row 2", "hash_ids", "18446744073709551616", "64 bits"],
        ),
    ],
)
def test_bad_traces_are_refused_by_place(tmp_path, text, named):
    path = write(tmp_path / "bad.csv", text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    for part in [str(path), *named]:
        assert part in str(caught.value)


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(TraceError, match="missing"):
        read_trace(tmp_path / "missing")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 1000)[:20])
    with pytest.raises(TraceError, match=r"cut\.gz"):
        read_trace(tmp_path / "cut.gz")
    damaged = bytearray(gzip.compress(b"x" * 1000))
    damaged[10] = 0xFF  # a kind of block that does not exist
    (tmp_path / "damaged.gz").write_bytes(damaged)
    with pytest.raises(TraceError, match=r"damaged\.gz: cannot be read"):
        read_trace(tmp_path / "damaged.gz")


def test_fields_and_files_without_an_end_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + '"' + "a" * 200_000)
    with pytest.raises(TraceError, match=r"trace\.csv: row 2: field larger than"):
        read_trace(path)
    monkeypatch.setattr(traces, "MAX_BYTES", 1 << 20)
    for text in (b"x" * ((1 << 20) + 1), gzip.compress(b"x" * ((1 << 20) + 1))):
        path.write_bytes(text)
        with pytest.raises(TraceError, match=r"trace\.csv: its text has more than 1 MiB"):
            read_trace(path)


def test_window_and_rate():
    requests = [TraceRequest(float(t), 10 + t, 1) for t in range(10)]
    cut = window(requests, 3.0, 2.0)
    assert [(r.arrival, r.prompt_tokens) for r in cut] == [(0.0, 13), (1.0, 14)]
    assert [r.arrival for r in scale_rate(cut, 4.0)] == [0.0, 0.25]
    assert len(window(requests, 3.0)) == 7


def test_scaling_lengths_keeps_blocks_whole():
    requests = [TraceRequest(0.0, 1034, 100, (7, 8, 9)), TraceRequest(1.0, 50, 3)]
    half = scale_lengths(requests, 0.5)
    assert half[0] == TraceRequest(0.0, 2 * 256 + 5, 50, (7, 8, 9), 256)
    assert (half[1].prompt_tokens, half[1].output_tokens) == (25, 2)
    tiny = scale_lengths(requests, 1e-4)
    assert (tiny[0].prompt_tokens, tiny[0].block_tokens, tiny[0].output_tokens) == (3, 1, 1)


def test_clipping_drops_blocks_beyond_the_cut():
    (request,) = clip_lengths([TraceRequest(0.0, 1034, 100, (7, 8, 9))], 600, 20)
    assert request == TraceRequest(0.0, 600, 20, (7, 8))


@pytest.mark.parametrize(
    ("name", "rows", "prompt", "output", "minutes"),
    [
        ("AzureLLMInferenceTrace_code_2023.csv", 8819, 2048, 28, 57),
        ("AzureLLMInferenceTrace_conv_2023.csv", 19366, 1155, 211, 58),
        ("mooncake_conversation_trace.jsonl.gz", 12031, 12035, 343, 59),
        ("sharegpt_lengths.csv.gz", 58787, 299, 324, None),
    ],
)
def test_public_traces(name, rows, prompt, output, minutes):
    if not (PUBLIC / name).exists():
        pytest.skip("the public traces are not here")
    requests = read_trace(PUBLIC / name)
    assert len(requests) == rows
    assert round(sum(r.prompt_tokens for r in requests) / rows) == prompt
    assert round(sum(r.output_tokens for r in requests) / rows) == output
    if minutes is None:
        assert not has_arrivals(requests)
    else:
        assert minutes - 1 <= requests[-1].arrival / 60 <= minutes + 1


def test_reuse_in_the_public_mooncake_trace():
    path = PUBLIC / "mooncake_conversation_trace.jsonl.gz"
    if not path.exists():
        pytest.skip("the public traces are not here")
    seen, blocks, repeated = set(), 0, 0
    for request in read_trace(path):
        for block in request.hash_ids:
            blocks += 1
            repeated += block in seen
            seen.add(block)
    assert round(repeated / blocks * 100, 1) == 36.6


def test_a_turn_goes_on_in_the_block_that_the_turn_before_had_begun():
    """Blocks have an id of their own for each length."""
    turns = [(600, (0, 10)), (900, (0, 11)), (1100, (0, 12, 20)), (1400, (0, 12, 21))]
    requests = [TraceRequest(float(i), t, 5, ids) for i, (t, ids) in enumerate(turns)]
    going_on = continued(requests)
    assert [one.hash_ids for one in going_on] == [(0, 12), (0, 12), (0, 12, 21), (0, 12, 21)]
    assert [one.prompt_tokens for one in going_on] == [600, 900, 1100, 1400]


def test_conversations_that_share_a_block_do_not_go_on_in_each_other():
    requests = [
        TraceRequest(0.0, 900, 5, (0, 10)),
        TraceRequest(1.0, 600, 5, (0, 11)),  # is no longer than the one before
        TraceRequest(2.0, 300, 5, (30,)),
    ]
    assert continued(requests) == requests
