"""Values in Redis that two releases share: what release 0 has written is read and trusted, byte by byte.

Each value is as commits before the first release wrote it. A value changes only by fields that readers ignore; another
layout gets another key (docs/adr/0123-two-releases-in-one-fleet.md).
"""

import json
import re
from importlib.resources import files
from pathlib import Path

from tandem_services.router.deployment import Deployment
from tandem_services.router.keys import Keys
from tandem_services.router.registry import ROW, pack_row, read_record
from tandem_services.router.shared_state import SessionBindings, SessionName
from tandem_testing.router_builders import make_record

SAMPLES = json.loads((Path(__file__).parent / "redis_release_0.json").read_text("utf-8"))
DEPLOYMENT = Deployment(b"a secret of two releases")
KEYS = Keys("default", DEPLOYMENT.namespace)


def lua(script: str, name: str) -> str:
    text = (files("tandem_services.router") / "scripts" / f"{script}.lua").read_text("utf-8")
    found = re.search(rf"^local {name} = (\S+)$", text, re.MULTILINE)
    assert found is not None
    return found[1]


def test_row_of_release_0_is_trusted_and_read():
    fields = SAMPLES["worker"]
    assert DEPLOYMENT.wrote(fields)
    record = read_record(fields)
    assert record is not None
    assert (record.view.incarnation, record.view.release, record.load.queue_tokens) == ("w1@1", 0, 12.5)
    assert record.view.adapters["sql"].digest == "0a" * 16
    assert record.links[0].peer == "d1@7"


def test_row_with_fields_of_a_later_release_is_trusted():
    fields = {name: text for name, text in SAMPLES["worker"].items() if name != "proof"} | {"later": "1"}
    later = fields | {"proof": DEPLOYMENT.row_proof({n: t for n, t in fields.items() if n != "number"})}
    assert DEPLOYMENT.wrote(later)
    assert read_record(later) == read_record(SAMPLES["worker"])


def test_signatures_of_release_0_are_valid():
    assert DEPLOYMENT.claimant(SAMPLES["claim"]) == "w1@1"
    assert DEPLOYMENT.condemner(SAMPLES["verdict"], "w1@1") == "w2@5"
    assert DEPLOYMENT.was_for_memory(SAMPLES["verdict_for_memory"], "w1@1")
    assert DEPLOYMENT.registered("mini", "content", proof=SAMPLES["adapter_proof"])


def test_routing_rows_have_the_layout_of_release_0():
    assert pack_row(make_record("w1")).hex() == SAMPLES["routing_row"]
    assert ROW.size == int(lua("fleet_row", "PAYLOAD_BYTES"))
    assert {name: lua("fleet_row", name) for name in ("ROW", "RESERVATION")} == SAMPLES["lua"]


def test_keys_have_the_names_of_release_0():
    bindings = SessionBindings(client=None, keys=KEYS)  # type: ignore[arg-type]  # names alone are wanted of it
    names = {
        "shared": list(KEYS.shared),
        "worker": KEYS.worker("w1"),
        "fenced": KEYS.fenced("w1@1"),
        "blocks": KEYS.blocks("w1@1"),
        "host": KEYS.host_blocks("w1@1"),
        "cursor": KEYS.cursor("w1@1"),
        "usage": list(KEYS.usage_of("t")),
        "fairness": list(KEYS.fairness),
        "others": [KEYS.quarantine, KEYS.adapters, KEYS.starting, KEYS.ticket("0a")],
        "session": bindings._key(SessionName(id="s", cache_salt="salt")),
    }
    assert names == SAMPLES["keys"]
