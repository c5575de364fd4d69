"""Who is admitted next, by itself."""

from tests.systems.handmade import decoding, view, waiting
from twolane.estimate.online import OnlineEstimator
from twolane.systems.common.admission import next_chunks


def test_a_page_is_left_for_every_request_that_decodes() -> None:
    for free, admitted in ((5, ()), (6, ("a",))):
        seen = view(
            OnlineEstimator(),
            waiting=[waiting("a", 64, page_cost=4)],
            decoding=[decoding("b", 16), decoding("c", 16)],
            free_pages=free,
            reclaimable_pages=0,
        )
        chunks = next_chunks(seen, 4096, split=False)
        assert tuple(chunk.request for chunk in chunks) == admitted
