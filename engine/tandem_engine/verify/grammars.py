"""Grammars that some prompts of the matrix are answered in: on every path beside free ones.

The reference applies the same masks in the plainest loop there is: one prompt, one token, one matcher that is
never rolled back, copied or replayed.
"""

from collections.abc import Mapping
from contextlib import closing

from tandem_engine.config import GrammarConfig
from tandem_engine.loaded_model import LoadedModel
from tandem_engine.messages.grammar import GrammarKind, GrammarSpec
from tandem_engine.sampling.grammar.backend import CompiledGrammar
from tandem_engine.sampling.grammar.guidance.backend import GuidanceBackend

SCHEMA = """{
  "type": "object",
  "properties": {
    "name": {"type": "string", "maxLength": 8},
    "legs": {"type": "integer", "minimum": 0, "maximum": 8},
    "wild": {"type": "boolean"}
  },
  "required": ["name", "legs", "wild"],
  "additionalProperties": false
}"""

SPECS = (
    GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=SCHEMA, whitespace_pattern=""),
    GrammarSpec(kind=GrammarKind.REGEX, source=r"[a-z ]{3,30}(!|\\?)"),
    GrammarSpec(kind=GrammarKind.CHOICE, source='["a fox", "a fox and a river", "neither of them"]'),
    GrammarSpec(kind=GrammarKind.JSON_OBJECT),
)
PATIENT = GrammarConfig(compile_timeout=120.0)
"""Nothing of `SPECS` takes long to compile; a machine may be busy, and that is no difference."""


def compile_grammars(model: LoadedModel) -> Mapping[GrammarSpec, CompiledGrammar]:
    """For the reference. Empty when the model cannot follow grammars."""
    if model.vocabulary is None:
        return {}
    with closing(GuidanceBackend(vocabulary=model.vocabulary, config=PATIENT)) as backend:
        return {spec: backend.compile(spec) for spec in SPECS}
