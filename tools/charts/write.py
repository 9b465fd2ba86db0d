"""Write what in charts/ follows from elsewhere: tests/charts check that the committed files are what this writes.

python tools/charts/write.py [FOLDER]     FOLDER instead of charts/, which it reads all the same

tandem-model/values.schema.json    from the classes of tandem_operator.api
*/README.md                        tables of values, from values.yaml and values.schema.json
"""

import argparse
import json
from pathlib import Path

from values_schema import model_values_schema
from values_table import readme

CHARTS = Path(__file__).resolve().parents[2] / "charts"


def documents() -> dict[str, str]:
    """Texts by path below charts/."""
    model_schema = model_values_schema()
    schemas = {
        "tandem": json.loads((CHARTS / "tandem" / "values.schema.json").read_text("utf-8")),
        "tandem-model": model_schema,
    }
    texts = {f"{chart}/README.md": readme(CHARTS / chart, schema) for chart, schema in schemas.items()}
    texts["tandem-model/values.schema.json"] = json.dumps(model_schema, indent=2) + "\n"
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=CHARTS)
    folder = parser.parse_args().folder
    for path, text in documents().items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
        print(target)


if __name__ == "__main__":
    main()
