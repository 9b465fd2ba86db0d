"""Requests of gateways, by the release that they name."""

import pytest

from tandem_engine.base.release import RELEASE, WINDOW
from tandem_engine.engine.process_loop import MAX_NAMED_RELEASES, GatewayReleases
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams

OUTSIDE = RELEASE + WINDOW + 1


def request(release: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=4)
    return GenerateRequest(rid="r-0-0", input_ids=(1,), sampling=sampling, resume_ids=(5, 6), release=release)


@pytest.mark.parametrize("release", [RELEASE - WINDOW, RELEASE, RELEASE + WINDOW])
def test_gateway_of_the_window_is_served(release):
    assert GatewayReleases().refusal(request(release)) is None


def test_gateway_outside_the_window_is_refused_by_name():
    refusal = GatewayReleases().refusal(request(OUTSIDE))
    assert refusal is not None
    (output,) = refusal.outputs
    assert (output.rid, output.index, output.token_ids) == ("r-0-0", 2, ())
    assert output.finish is not None
    assert (output.finish.reason, output.finish.code) == (FinishReason.ERROR, "release_skew")
    assert output.finish.retryable
    assert f"release {OUTSIDE}, outside the window of release {RELEASE}" in str(output.finish.error)


def test_refused_release_is_logged_once(caplog):
    gateways = GatewayReleases()
    for _ in range(3):
        gateways.refusal(request(OUTSIDE))
        gateways.refusal(request(OUTSIDE + 1))
    assert len(caplog.messages) == 2


def test_many_refused_releases_fill_no_log(caplog):
    gateways = GatewayReleases()
    for number in range(4 * MAX_NAMED_RELEASES):
        gateways.refusal(request(OUTSIDE + number))
    assert len(caplog.messages) == MAX_NAMED_RELEASES
