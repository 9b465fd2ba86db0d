"""Schema of the values of charts/tandem-model: the spec of a ModelService as JSON Schema, and the chart's own values.

A structural schema of Kubernetes refuses unknown fields by itself and knows words that JSON Schema does not; Helm
checks values by JSON Schema, draft 7. So a typo is refused by helm, before anything is sent to a cluster.
"""

from typing import Any

from tandem_operator.api.crds import crds

Json = dict[str, Any]

OWN_VALUES: Json = {
    "global": {"type": "object", "description": "Values of a parent chart; not used."},
    "nameOverride": {
        "type": "string",
        "maxLength": 40,
        "pattern": "^([a-z]([-a-z0-9]*[a-z0-9])?)?$",
        "description": "Name of the ModelService. Empty: the release's.",
    },
    "labels": {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "description": "Labels of the ModelService.",
    },
    "annotations": {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "description": "Annotations of the ModelService.",
    },
}


def model_values_schema() -> Json:
    """JSON Schema of all values."""
    service = crds()[0]
    spec = service["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    values = json_schema(spec)
    # Empty until a user chooses; the template's error then lists what to choose from.
    values["properties"]["model"]["maxProperties"] = 1
    del values["required"]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart tandem-model",
        **values,
        "properties": {**OWN_VALUES, **values["properties"]},
    }


def json_schema(structural: Json) -> Json:
    """The same as JSON Schema; rules in CEL are left to the API server."""
    schema = {
        key: value for key, value in structural.items() if not key.startswith("x-kubernetes-") and key != "format"
    }
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if schema.pop(exclusive, False):
            schema[exclusive] = schema.pop(bound)
    if "properties" in schema:
        schema["properties"] = {name: json_schema(one) for name, one in schema["properties"].items()}
        schema["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        schema["additionalProperties"] = json_schema(schema["additionalProperties"])
    if "items" in schema:
        schema["items"] = json_schema(schema["items"])
    return schema
