"""Other cells as the flags of a gateway name them."""

from pathlib import Path

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_services.cli.main import main
from tandem_services.router.cells.places import MAX_CELLS, CellPlace, read_places


def test_cells_are_read_with_their_files():
    assert read_places(["west=redis://w:1/0", "east=rediss://e?ssl_ca_certs=/ca"], ["east=/run/e"], own="home") == (
        CellPlace(name="west", url="redis://w:1/0"),
        CellPlace(name="east", url="rediss://e?ssl_ca_certs=/ca", password_file=Path("/run/e")),
    )
    assert read_places([], [], own="home") == ()


@pytest.mark.parametrize(
    ("cells", "files", "message"),
    [
        (["west"], [], "--cells is NAME=URL"),
        (["=redis://w"], [], "--cells is NAME=URL"),
        (["west="], [], "--cells is NAME=URL"),
        (["we st=redis://w"], [], "--cells: a name must be 1 to 128 letters"),
        (["home=redis://w"], [], "'home' is the gateway's own --cluster"),
        (["west=redis://w", "west=redis://x"], [], "'west' is given twice"),
        (["west=http://w"], [], "--cells west=http://w: "),
        (["west=redis://user:hunter2@w"], [], "add --cell-password-files west=FILE"),
        (["west=redis://w"], ["east=/run/e"], "'east' is not in --cells; add east=URL there"),
        (["west=redis://w"], ["west"], "--cell-password-files is NAME=FILE"),
        ([f"c{number}=redis://w" for number in range(MAX_CELLS + 1)], [], f"a gateway may have {MAX_CELLS} others"),
    ],
)
def test_bad_cells_are_refused_with_the_fix(cells, files, message):
    with pytest.raises(ConfigError) as refused:
        read_places(cells, files, own="home")
    assert message in str(refused.value)


@pytest.mark.parametrize("place", ["w/0", "w/not-a-number"])
def test_password_of_a_refused_url_is_not_shown(place):
    with pytest.raises(ConfigError) as refused:
        read_places([f"west=redis://user:hunter2@{place}"], [], own="home")
    assert "hunter2" not in str(refused.value)


def test_missing_file_is_an_error_of_the_address_alone(tmp_path):
    (place,) = read_places(["west=redis://w"], [f"west={tmp_path / 'later'}"], own="home")
    with pytest.raises(ConfigError, match="no such file"):
        place.address()
    (tmp_path / "later").write_text("secret")
    assert place.address().password_file == tmp_path / "later"


def test_gateway_of_several_models_has_no_cells(tmp_path, capsys):
    file = tmp_path / "models.json"
    file.write_text('{"models": []}')
    words = ["--redis-url", "redis://h", "--models", str(file), "--cells", "west=redis://w"]
    assert main(["gateway", *words]) == 2
    assert "--cells are of one model: leave out --models" in capsys.readouterr().err
