"""The gateway image holds neither torch nor transformers."""

import subprocess
import sys


def test_gateway_imports_no_torch():
    program = (
        "import sys, tandem_services.gateway.serve\n"
        "heavy = {'torch', 'transformers', 'numpy', 'nixl', 'numba', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
