"""The Helm library as a command: requests as lines of JSON on stdin, answers as lines of JSON on stdout.

    ~/.cache/tandem-helm/python tools/helm/helm.py < requests

Starting the library takes seconds and a request some tens of milliseconds, so that tests keep one process. Requests:

    {"do": "render", "chart": PATH, "release": NAME, "namespace": NAME, "values": {…}, "kube": "1.34.0", "without": […]}
    {"do": "lint", "chart": PATH}
    {"do": "package", "chart": PATH, "folder": PATH}
    {"do": "push", "archive": PATH, "registry": "oci://…"}
    {"do": "install" | "upgrade", "chart": …, "release": …, "namespace": …, "values": …, "kubeconfig": PATH}
        upgrade also "reuse": BOOL, for --reuse-values
    {"do": "uninstall" | "history", "release": …, "namespace": …, "kubeconfig": PATH}

Answers: {"ok": …}, or {"error": what Helm says}. Rendered are manifest and notes; crds/ is left out, being no template.
"""

import asyncio
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import helm_sdkpy
from stub_api import stub_api

Json = dict[str, Any]

TIMEOUT_S = 120
"""Of an action at a real cluster."""


async def answer(request: Json) -> Any:
    """Carries out one request."""
    match request["do"]:
        case "render":
            return await _render(request)
        case "lint":
            return await helm_sdkpy.Lint(helm_sdkpy.Configuration()).run(request["chart"])
        case "package":
            return await helm_sdkpy.Package(helm_sdkpy.Configuration()).run(request["chart"], request["folder"])
        case "push":
            push = helm_sdkpy.Push(helm_sdkpy.Configuration())
            return await push.run(request["archive"], request["registry"])
        case "install":
            values = request.get("values") or None
            install = helm_sdkpy.Install(_cluster(request))
            return await install.run(request["release"], request["chart"], values=values, wait=False, timeout=TIMEOUT_S)
        case "upgrade":
            values = request.get("values") or None
            upgrade = helm_sdkpy.Upgrade(_cluster(request))
            how = {"wait": False, "timeout": TIMEOUT_S, "reuse_values": request.get("reuse", False)}
            return await upgrade.run(request["release"], request["chart"], values=values, **how)
        case "uninstall":
            uninstall = helm_sdkpy.Uninstall(_cluster(request))
            return await uninstall.run(request["release"], wait=True, timeout=TIMEOUT_S)
        case "history":
            return await helm_sdkpy.History(_cluster(request)).run(request["release"])
        case other:
            raise ValueError(f"no such request: {other!r}")


def _cluster(request: Json) -> helm_sdkpy.Configuration:
    return helm_sdkpy.Configuration(namespace=request["namespace"], kubeconfig=request["kubeconfig"])


async def _render(request: Json) -> Json:
    with tempfile.TemporaryDirectory() as folder, stub_api(request["kube"], tuple(request["without"])) as kubeconfig:
        config = Path(folder) / "kubeconfig"
        config.write_text(json.dumps(kubeconfig))
        chart = Path(folder) / Path(request["chart"]).name
        shutil.copytree(request["chart"], chart, ignore=shutil.ignore_patterns("crds"))
        install = helm_sdkpy.Install(helm_sdkpy.Configuration(request["namespace"], kubeconfig=str(config)))
        values = request["values"] or None
        release = await install.run(request["release"], str(chart), values=values, wait=False)
    return {"manifest": release["manifest"], "notes": release["info"].get("notes", "")}


def main() -> None:
    """Until stdin ends."""
    # The library itself prints what it has pushed.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = {"ok": asyncio.run(answer(json.loads(line)))}
        except (helm_sdkpy.HelmError, ValueError, KeyError) as error:
            reply = {"error": f"{error}"}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
