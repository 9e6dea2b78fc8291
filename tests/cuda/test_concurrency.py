"""Calls from many host threads, on one stream and on more streams than there are sets of counters, and beside
replays of graphs: every result has the bits of the call alone."""

import pytest
import torch
from trust.concurrency import LAYERS, Calls, Replays, at_once, many_streams

pytestmark = pytest.mark.gpu

THREADS = 8
CALLS = 200  # of each thread


@pytest.fixture(scope="module")
def calls(device):
    yield Calls(device)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("is_side", (False, True), ids=("current", "side"))
def test_one_stream(device, calls, is_side):
    stream = torch.cuda.Stream(device) if is_side else torch.cuda.current_stream(device)
    assert not at_once(calls, [[stream]] * THREADS, CALLS)


def test_many_streams(device, calls):
    """264 streams: the library has 128 sets of counters, so streams share some."""
    pools = [torch.cuda.Stream(device, priority) for priority in (0, -1) for _ in range(32)]
    with many_streams(200) as others:
        streams = pools + others
        assert not at_once(calls, [streams[i::THREADS] for i in range(THREADS)], CALLS)


def test_graphs_beside_eager_calls(device, calls):
    replays = Replays(calls, [i for i, (_, _, trains) in enumerate(calls.runs) if not trains][1::3])
    pools = [torch.cuda.Stream(device, priority) for priority in (0, -1) for _ in range(32)]
    assert not at_once(calls, [pools[i::4] for i in range(4)], CALLS, beside=replays)


@pytest.mark.sanitizer
def test_two_threads(device):
    """Few enough calls for compute-sanitizer."""
    (_, options, _), (_, _, format) = LAYERS[4], LAYERS[2]
    layers = (((8, 2, 128, 128), options, None), ((8, 2, 128, 128), {}, format))
    few = Calls(device, layers, tokens=(3, 40), train=(False,))
    assert not at_once(few, [[torch.cuda.current_stream(device)], [torch.cuda.Stream(device)]], 20)
