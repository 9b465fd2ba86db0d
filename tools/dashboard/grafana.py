"""Grafana's JSON model of a dashboard, as far as this dashboard needs it.

Rows are laid out from left to right, a new line beginning where a panel does not fit. Ids and positions follow from
the order, so the same rows always give the same text. The format is described at
https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

GRID_WIDTH = 24
SCHEMA_VERSION = 39
"""Of Grafana 10.4; newer ones migrate it when they load it."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """`legend` names the curves, with `{{label}}` for the value of a label."""

    expr: str
    legend: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """Curves over time."""

    title: str
    description: str
    """What it says and what to do about it: a reader of a dashboard has no manual open."""
    unit: str
    """Grafana's name of the unit: s, reqps, Bps, percentunit, short …"""
    queries: tuple[Query, ...]
    stacked: bool = False
    """Of curves whose sum means something."""
    width: int = 8
    height: int = 8


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a reader chooses at the top: values of `label` of the series `metric`, all of them to begin with."""

    name: str
    title: str
    metric: str
    label: str


def dashboard(*, uid: str, title: str, description: str, choices: Sequence[Choice], rows: Sequence[Row]) -> str:
    """The text of a file that Grafana imports or provisions."""
    model = {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["tandem", "llm"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_source_choice(), *map(_choice, choices)]},
        "annotations": {"list": []},
        "links": [],
        "panels": _laid_out(rows),
    }
    return json.dumps(model, indent=2, ensure_ascii=False) + "\n"


def _source_choice() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1}


def _choice(choice: Choice) -> dict[str, Any]:
    query = f"label_values({choice.metric}, {choice.label})"
    return {
        "name": choice.name,
        "label": choice.title,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": choice.name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _laid_out(rows: Sequence[Row]) -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        panels.append(_row(row.title, len(panels) + 1, y))
        y += 1
        x = line_height = 0
        for panel in row.panels:
            if x + panel.width > GRID_WIDTH:
                x, y, line_height = 0, y + line_height, 0
            panels.append(_panel(panel, len(panels) + 1, x, y))
            x += panel.width
            line_height = max(line_height, panel.height)
        y += line_height
    return panels


def _row(title: str, number: int, y: int) -> dict[str, Any]:
    position = {"x": 0, "y": y, "w": GRID_WIDTH, "h": 1}
    return {"id": number, "type": "row", "title": title, "gridPos": position, "collapsed": False, "panels": []}


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": _curves(panel), "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [_target(query, chr(ord("A") + place)) for place, query in enumerate(panel.queries)],
    }


def _curves(panel: Panel) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    return {
        "unit": panel.unit,
        "min": 0,
        "custom": {"fillOpacity": 30 if panel.stacked else 5, "showPoints": "never", "stacking": stacking},
    }


def _target(query: Query, reference: str) -> dict[str, Any]:
    return {
        "refId": reference,
        "datasource": SOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
        "range": True,
    }
