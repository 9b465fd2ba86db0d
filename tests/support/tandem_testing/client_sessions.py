"""What the sessions of client libraries ask for: one tool, one schema, one question, on a model trained on neither."""

from typing import Any

QUESTION = "What will the weather be in Bern?"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Genf"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "forecast", "parameters": PARAMETERS},
}


def check_forecast(arguments: dict[str, Any]) -> None:
    """They satisfy `PARAMETERS`, which only a grammar can make them do."""
    assert set(arguments) == {"city", "days"}
    assert arguments["city"] in ("Bern", "Genf")
    assert 1 <= arguments["days"] <= 9
