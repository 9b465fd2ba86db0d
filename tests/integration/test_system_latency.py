"""Latency of a real fleet is predicted, sent to clients, and compared with what was measured."""

import pytest

from tandem_testing.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("system")]

SHOWN_S = 60.0
HEADER = "x-tandem-predicted-ttft-ms"


async def test_calibration_of_a_real_fleet_sees_the_request(fleet):
    before = await fleet.metric("tandem_gateway_ttft_prediction_ratio_count")
    body = {"model": fleet.model, "prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}
    response = await fleet.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    [choice] = (await fleet.get(f"/v1/requests/{response.json()['id']}/explain"))["choices"]
    [attempt] = choice["attempts"]
    predicted = attempt["predicted"]
    assert int(response.headers[HEADER]) == round(1000 * predicted["ttft_s"])
    terms = {term["name"]: term["seconds"] for term in predicted["terms"]}
    assert terms["prefill_compute"] > 0.0
    assert terms["step_base"] > 0.0
    assert predicted["itl_s"] > 0.0

    async def compared() -> bool:
        if await fleet.metric("tandem_gateway_ttft_prediction_ratio_count") > before:
            return True
        # Requests that come while a worker seems to be missing are not compared: a machine with much to do has some.
        await fleet.complete("Once upon a time", max_tokens=8)
        return False

    await until(compared, SHOWN_S, "a request is compared with its prediction")

    async def shown() -> bool:
        rows = (await fleet.get("/console/data/fleet"))["latency"]
        return any(row["kind"] == predicted["kind"] and row["samples"] >= 1 for row in rows)

    await until(shown, SHOWN_S, "the console shows what was learned")
