"""What `tandem router` refuses before it starts."""

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_services.cli.main import main
from tandem_services.router_server.grpc_server import tls_credentials
from tandem_testing.tokenizer_builders import write_tokenizer


@pytest.fixture
def folder(tmp_path):
    folder = write_tokenizer(tmp_path / "m")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("models", [["", "m={}"], ["a={}", "b,a={}"], ["a,a={}"], ["a,={}"], ["={}"]])
def test_router_refuses_two_models_of_one_name(models, folder, capsys):
    flags = [flag for text in models for flag in ("--model", text.format(folder) or str(folder))]
    assert main(["router", "--redis-url", "redis://127.0.0.1:1", *flags]) == 2
    assert "unique names" in capsys.readouterr().err


def test_folder_without_a_model_is_named(tmp_path, capsys):
    assert main(["router", "--redis-url", "redis://127.0.0.1:1", "--model", f"a={tmp_path}"]) == 2
    assert "no config.json" in capsys.readouterr().err


def test_certificate_and_key_go_together_and_must_be_there(tmp_path):
    assert tls_credentials(None, None) is None
    for cert, key in ((tmp_path / "c", None), (None, tmp_path / "k")):
        with pytest.raises(ConfigError, match="go together"):
            tls_credentials(cert, key)
    with pytest.raises(ConfigError, match="No such file"):
        tls_credentials(tmp_path / "c", tmp_path / "k")
